"""How samples are laid out for a model: packed, each prompt once for its group, or padded where a model can't do that.

The plan and the batch have to agree on it, so both come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf.batching import CostModel, LongerSequences, MicroBatch, Plan, SampleLength, plan, plan_packed
from rlhf.models.batch import PaddedBatch, pad_batch, synthetic_batch
from rlhf.models.packed import PackedBatch, can_pack, cut, pack_batch, synthetic_packed_batch
from rlhf.models.sequence import SequenceGroup
from rlhf.trajectories import Columns

Batch = PaddedBatch | PackedBatch

# Their equality on packed rows and alone is a test. Other architectures show it at start-up, or are padded.
TESTED = frozenset({"gemma3_text", "llama", "qwen2"})


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Packed rows with a cost for planning, or padded rows and the reason for that.

    With a `sequence` group, batches are this rank's pieces of the rows that the group shares.
    """

    cost: CostModel
    reason: str | None = None
    sequence: SequenceGroup | None = None

    @staticmethod
    def of(model: Any, sequence: SequenceGroup | None = None) -> Arrangement:
        """What a model of ours (with the transformers model as `lm`) can be given; collective under ZeRO stage 3.

        Raises `ValueError` with the reason when ranks are to share rows and this model's have to be padded.
        """
        config = model.lm.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        embedding = config.vocab_size * config.hidden_size
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.lm.parameters())
        cost = CostModel.of_decoder(max(1, count - embedding), int(config.num_hidden_layers), heads, head_dim)
        reason = None if config.model_type in TESTED else can_pack(model)
        if reason is not None and sequence is not None:
            raise ValueError(
                f"sequence_parallel = {sequence.size}: ranks can share packed rows only, and this model's rows have to "
                f"be padded: {reason}. Leave sequence_parallel out"
            )
        return Arrangement(cost, reason, sequence)

    @property
    def packed(self) -> bool:
        """Whether rows are packed."""
        return self.reason is None

    def plan(
        self,
        samples: Sequence[SampleLength],
        ranks: int,
        minibatches: int,
        max_tokens: int,
        longer: LongerSequences = "alone",
    ) -> Plan:
        """Plan one pass over the samples: `plan_packed`, or `plan`."""
        if self.packed:
            return plan_packed(samples, ranks, minibatches, max_tokens, self.cost, longer=longer)
        return plan(samples, ranks, minibatches, max_tokens, longer)

    def batch(self, micro_batch: MicroBatch, columns: Sequence[Columns], device: torch.device | str) -> Batch:
        """The tensors of a micro-batch, given its samples' columns; raises `ValueError` as `pad_batch` does."""
        ids = micro_batch.sample_ids
        if self.packed:
            return self._own(pack_batch(columns, micro_batch.group_ids, device, ids))
        return pad_batch(columns, device, ids)

    def largest(
        self, max_tokens: int, prompt: int, response: int, samples: int, group: int, device: torch.device | str
    ) -> Batch:
        """The largest micro-batch of at most `samples` samples of the longest kind, `group` to a prompt.

        A single sample that is longer than `max_tokens` stands alone.
        """
        if not self.packed:
            rows = min(max(1, max_tokens // (prompt + response)), samples)
            return synthetic_batch(rows, prompt, response, device)
        together = max(1, min(group, samples, (max_tokens - prompt) // response))
        groups = max(1, min(samples // together, max_tokens // (prompt + together * response)))
        return self._own(synthetic_packed_batch(groups, together, prompt, response, device))

    def _own(self, row: PackedBatch) -> PackedBatch:
        """What this rank computes of a row."""
        return row if self.sequence is None else cut(row, self.sequence)
