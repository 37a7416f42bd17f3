"""The sections of models: what learns (`policy`, `critic`), and what only scores (`reference`, `reward.model`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf.config.fields import (
    FiniteFloat,
    ModuleName,
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    ZeroStage,
)


class LearnerConfig(Section):
    """What every learner has: ranks, optimizer, and how a batch is cut."""

    ranks: PositiveInt = Field(default=1, description="Ranks, one device each.")
    sequence_parallel: PositiveInt = Field(
        default=1,
        description="Ranks that share each packed row, for long sequences (Ulysses): each computes a piece of its "
        "tokens, and in attention some of the heads. It divides `ranks` and the model's heads and KV heads.",
    )
    zero_stage: ZeroStage = Field(default=2, description="DeepSpeed ZeRO stage.")
    learning_rate: NonNegativeFloat = Field(
        default=1.0e-5, description="Peak learning rate of AdamW; 0 trains nothing and serves as a control."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after warm-up; linear and cosine fall to 0 at the last step."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up from 0.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay of AdamW.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Gradients are scaled down to this global norm.")
    epochs: PositiveInt = Field(default=1, description="Passes over each batch.")
    minibatches: PositiveInt = Field(
        default=1, description="Optimizer updates per pass; whole groups stay together where they can."
    )
    max_tokens_per_microbatch: PositiveInt = Field(
        default=2048,
        description="Cap on the tokens of one micro-batch, a prompt counted once for its samples in it.",
    )
    longer_sequences: Literal["alone", "refuse"] = Field(
        default="alone",
        description="A sequence that is longer than the cap: alone in a micro-batch, or refused, which makes the cap a "
        "hard one.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep only the inputs of layers and compute the rest again in the backward pass: a third more "
        "operations, for a fraction of the activations.",
    )
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        default="none",
        description="What of a rank's share lies in the host's memory and not on its device: nothing, optimizer state "
        "and gradients, or the weights as well. The optimizer's step is then the CPU's. For ZeRO stage 3; on CPU it is "
        "the same memory.",
    )
    offload_to: Literal["host", "disk"] = Field(
        default="host",
        description="Where offloaded optimizer state lies: in the host's memory, or among the run's temporary files "
        "(TMPDIR), which then have to be on a fast local disk. On a disk it is in no checkpoint. Needs libaio.",
    )
    deadline_s: PositiveFloat = Field(
        default=1800, description="Deadline of one update, and of loading the model, seconds."
    )

    @property
    def data_ranks(self) -> int:
        """Shares that a batch is divided into, one for each rank or each group of ranks that share rows."""
        return self.ranks // self.sequence_parallel


class LoraConfig(Section):
    """Train low-rank adapters beside the policy's frozen weights instead of the weights themselves (LoRA).

    Set `policy.learning_rate` about ten times as high as for the weights themselves: 1e-4 is a start. Engines and the
    export get ordinary weights, with the adapters merged in, and the policy without its adapters is the reference
    model.
    """

    rank: PositiveInt = Field(description="Rank of the adapters; 8 to 32 are common.")
    alpha: PositiveFloat = Field(default=32.0, description="An adapter counts alpha / rank times.")
    target_modules: Literal["all-linear"] | Annotated[list[ModuleName], Field(min_length=1)] = Field(
        default="all-linear",
        description="Which layers have an adapter: all-linear (all but the output head), or the last parts of their "
        "names, e.g. [q_proj, v_proj].",
    )


class PolicyConfig(LearnerConfig):
    """The learner that trains the policy."""

    lora: LoraConfig | None = Field(
        default=None, description="Train low-rank adapters only (LoRA); all weights when absent."
    )


class CriticConfig(LearnerConfig):
    """The learner that trains the value model; started only where the advantage estimator needs it (gae)."""

    model: NonEmptyText = Field(
        default="policy",
        description="Where the value model starts: `policy` (model.path with a new head), `reward` (reward.model with "
        "its head), or a checkpoint.",
    )
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="A value may move this far from the one before the update; absent: no clipping."
    )
    warmup_batches: NonNegativeInt = Field(
        default=0,
        description="Batches before step 1 on which only the critic learns; they are dropped afterwards, and counted.",
    )


class ReferenceConfig(Section):
    """The frozen reference model; started only where something needs it."""

    ranks: PositiveInt = Field(default=1, description="Ranks, one device each.")
    sharded: bool = Field(
        default=False,
        description="Shard the weights over the ranks (ZeRO-3), for a model that one device can't hold. Otherwise "
        "every rank has a copy and scores on its own.",
    )
    deadline_s: PositiveFloat = Field(default=600, description="Deadline of scoring one group, seconds.")


class RewardModelConfig(Section):
    """A reward model: a sequence-classification checkpoint with one output, read at the last token."""

    path: NonEmptyText = Field(description="Folder of a Hugging Face sequence-classification model, or a hub name.")
    weight: FiniteFloat = Field(default=1.0, description="Factor in the weighted sum that trains.")
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="Compute dtype.")
    ranks: PositiveInt = Field(default=1, description="Ranks, one device each.")
    sharded: bool = Field(default=False, description="Shard the weights over the ranks, as `reference.sharded`.")
    deadline_s: PositiveFloat = Field(default=600, description="Deadline of scoring one group, seconds.")
