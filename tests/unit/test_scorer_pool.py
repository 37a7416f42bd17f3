"""Scorers as the driver sees them: which ranks a group is sent to, and what they are asked."""

from __future__ import annotations

from typing import Any

from rlhf.trainers.scorer_pool import ScorerPool
from tests.unit.test_trainer_batch import scored

GROUPS = [scored(number, [0.0, 0.0]).group for number in range(3)]


class Ranks:
    """Two ranks that remember what they were asked; together, each scores one sample of a group."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return 2

    async def call(self, method: str, samples: Any, **limits: Any) -> list[Any]:
        self.asked.append(("together", method))
        return [(([], [sample.sample_id]), f"columns of rank {rank}") for rank, sample in enumerate(samples)]

    async def call_rank(self, rank: int, method: str, samples: Any, **limits: Any) -> Any:
        self.asked.append((f"rank {rank}", method))
        return ([], [sample.sample_id for sample in samples]), f"columns of rank {rank}"


async def test_copies_take_groups_in_turn() -> None:
    ranks = Ranks()
    pool = ScorerPool(ranks, together=False, deadline_s=1)  # type: ignore[arg-type]
    found = [await pool.score(group, "") for group in GROUPS]
    assert ranks.asked == [("rank 0", "score"), ("rank 1", "score"), ("rank 0", "score")]
    assert found[1] == {"1-0": "columns of rank 1", "1-1": "columns of rank 1"}


async def test_ranks_together_score_a_share_each_of_every_group() -> None:
    ranks = Ranks()
    pool = ScorerPool(ranks, together=True, deadline_s=1, method="score_as_reference")  # type: ignore[arg-type]
    found = [await pool.score(group, "") for group in GROUPS]
    assert ranks.asked == [("together", "score_as_reference")] * 3
    assert found[2] == {"2-0": "columns of rank 0", "2-1": "columns of rank 1"}
