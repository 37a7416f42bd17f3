"""What a rank holds of a batch: the headers of all samples, the plan, and the data of its own share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf.batching import LearnerSample, MicroBatch, Plan, ScoredColumns, fetch_columns, fetch_scores
from rlhf.config.schema import LearnerConfig
from rlhf.learners.ranks import Ranks
from rlhf.models.arrangement import Arrangement
from rlhf.models.batch import flatten
from rlhf.trajectories import Columns


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a batch; `scores` by name, of its own samples, and only names that the batch has."""

    samples: dict[str, LearnerSample]
    layout: Plan
    columns: dict[str, Columns]
    scores: dict[str, ScoredColumns]

    def has(self, name: str) -> bool:
        """Whether the batch has these scores; from all headers, so the same on a rank without samples."""
        return any(name in sample.scores for sample in self.samples.values())

    def rows(self, micro_batch: MicroBatch) -> list[Columns]:
        """The columns of a micro-batch, in its row order."""
        return [self.columns[i] for i in micro_batch.sample_ids]

    def lengths(self, micro_batch: MicroBatch) -> list[int]:
        """Response tokens of a micro-batch's samples, in its row order."""
        return [self.samples[i].response_tokens for i in micro_batch.sample_ids]

    def flat(self, micro_batch: MicroBatch, name: str, device: object) -> Tensor | None:
        """The scores of that name of a micro-batch's response tokens: float32 [N]; None where the batch has none."""
        found = self.scores.get(name)
        if found is None:
            return None
        return flatten(self.rows(micro_batch), [found[i] for i in micro_batch.sample_ids], device)  # type: ignore[arg-type]


def make_shard(
    samples: Sequence[LearnerSample],
    learner: LearnerConfig,
    ranks: Ranks,
    arrangement: Arrangement,
    *,
    minibatches: int,
    names: Sequence[str] = (),
    deadline_s: float,
) -> Shard:
    """Plan the batch, and fetch this rank's columns and the scores in `names`; collective.

    Raises `LearnerError` on every rank when it fails on any.
    """
    with ranks.together("fetching samples"):
        by_id = {sample.sample_id: sample for sample in samples}
        lengths = [sample.length for sample in samples]
        cap, longer = learner.max_tokens_per_microbatch, learner.longer_sequences
        layout = arrangement.plan(lengths, ranks.data_ranks, minibatches, cap, longer)
        own = [by_id[i] for m in layout.minibatches for part in m.ranks[ranks.data_rank] for i in part.sample_ids]
        scores = {name: fetch_scores(own, name, deadline_s) for name in names}
        found = {name: columns for name, columns in scores.items() if columns is not None}
        shard = Shard(by_id, layout, fetch_columns(own, deadline_s), found)
    return shard
