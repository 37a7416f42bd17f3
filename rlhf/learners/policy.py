"""The policy learner: one instance a rank, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.batching import LearnerSample, ScoredColumns
from rlhf.config.schema import Config
from rlhf.learners.weight_sync import WeightSyncMixin
from rlhf.tracking.spans import Span, recorder, span

if TYPE_CHECKING:
    from torch import nn

    from rlhf.learners.ranks import Ranks
    from rlhf.learners.update import PolicyUpdate
    from rlhf.learners.zero import ZeroEngine


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, equal on all ranks, and the spans that this rank recorded since the last result."""

    metrics: dict[str, float]
    spans: list[Span]


class PolicyLearner(WeightSyncMixin):
    """One rank of the policy learner. All methods after the constructor are collective: call them on every rank.

    The constructor does nothing that can fail; `setup` does.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._ranks: Ranks
        self._zero: ZeroEngine
        self._update: PolicyUpdate

    def setup(self, master: tuple[str, int]) -> None:
        """Join the process group, whose rank 0 listens at `master` (address, port), and load the model."""
        import torch

        from rlhf.learners.ranks import Ranks
        from rlhf.learners.zero import ZeroEngine, join_process_group

        deterministic = self._config.run.deterministic
        if self._device == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(1 if deterministic else max(1, cores // self._world_size))
        torch.use_deterministic_algorithms(deterministic)
        deadline_s = self._config.policy.deadline_s
        with span("policy/setup"):
            join_process_group(self._rank, self._world_size, master, self._device, deadline_s)
            device = torch.device(self._device)
            self._ranks = Ranks(self._rank, self._world_size, device)
            self._zero = ZeroEngine(self._config, self._world_size, device)
        from rlhf.learners.update import PolicyUpdate

        self._update = PolicyUpdate(self._config, self._zero, self._ranks)

    def dry_run(self) -> None:
        """Run the largest micro-batch with the longest sequences forward and backward, and discard the gradients.

        What can't fit fails here, before step 1, and not when such a batch first comes up.
        """
        from rlhf.models.batch import synthetic_batch

        prompt, response = self._config.data.max_prompt_tokens, self._config.rollout.max_new_tokens
        samples = self._config.rollout.prompts_per_step * self._config.rollout.samples_per_prompt
        rows = max(1, self._config.policy.max_tokens_per_microbatch // (prompt + response))
        rows = min(rows, -(-samples // self._world_size))
        with span("policy/dry_run"):
            with self._ranks.together(
                f"a micro-batch of {rows} x {prompt + response} tokens, the largest of this run,"
            ):
                logprobs, _ = self._zero.forward(synthetic_batch(rows, prompt, response, self._ranks.device))
            self._zero.backward(logprobs.sum() * 0.0, last=True)
            self._zero.discard_gradients()

    def update(self, step: int, samples: Sequence[LearnerSample]) -> UpdateResult:
        """Train on `samples`; every rank gets all headers and fetches the columns of its own share.

        Raises `LearnerError` on every rank when it failed on any, with the samples concerned; the optimizer step in
        which that happened was not applied.
        """
        with span("policy/update", step):
            metrics = self._update.run(step, samples)
        return UpdateResult(metrics, recorder.drain())

    def logprobs(self, samples: Sequence[LearnerSample]) -> ScoredColumns:
        """Log-probs of this rank's share of the samples at the sampling temperature, under the current weights.

        float32 [T] by sample id, NaN where a token is not of the response. The ranks' shares make up the whole.
        """
        with span("policy/logprobs"):
            return self._update.logprobs(samples)

    def export(self, path: str | Path) -> None:
        """Write the policy to the folder `path` as a Hugging Face checkpoint with its tokenizer."""
        from rlhf.learners.export import export

        with span("policy/export"):
            export(self._zero, self._ranks, self._config.model.path, self._config.model.dtype, Path(path))

    def named_parameters_for_sync(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their checkpoint names; an output head that is the embedding's tensor is listed as well."""
        tied = self._zero.tied_head()
        return [*self._zero.named_parameters(), *([tied] if tied is not None else [])]

    def gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank."""
        return self._zero.gather(parameters)

    @property
    def module(self) -> Any:
        """The Hugging Face model."""
        return self._zero.module

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine."""
        return self._zero.deepspeed

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
