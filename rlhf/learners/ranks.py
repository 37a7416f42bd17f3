"""What the ranks of a learner agree on: votes and sums.

Invariant 14: all ranks make the same collective calls. Code that may fail on one rank alone runs inside `together`;
at its end the ranks vote, and if it failed anywhere it raises everywhere, so that no rank waits for one that left.
(A failure inside the model's own forward pass can leave the others in a gather, at ZeRO stage 3, or in an exchange,
where ranks share rows; they end at the process group's deadline.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlhf.models.sequence import SequenceGroup


class LearnerError(RuntimeError):
    """A step failed on some rank; raised on all of them, and nothing of the step was applied."""


class Ranks:
    """This process among the ranks of its learner.

    The batch is divided over `data_ranks`, and this rank works on the share of `data_rank`: alone, or with the other
    ranks of its `sequence` group, which are consecutive. Exactly one rank of each share `answers` for it.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, sequence: SequenceGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        sharing = 1 if sequence is None else sequence.size
        self.data_rank, self.data_ranks = rank // sharing, world_size // sharing
        self.answers = rank % sharing == 0

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on every rank; raise `LearnerError` on every rank if it raised on any.

        The error names `what`, the first rank that failed and its exception. On a rank that failed itself it is chained
        to that exception.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = torch.tensor([int(failure is not None)], device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed.item():
            return
        reports: list[str | None] = [None] * self.world_size
        dist.all_gather_object(reports, f"{type(failure).__name__}: {failure}" if failure is not None else None)
        rank, report = next((rank, report) for rank, report in enumerate(reports) if report is not None)
        raise LearnerError(f"{what} failed on rank {rank}: {report}") from failure

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_of_shares(self, values: Sequence[float]) -> list[float]:
        """Sums over the shares of the batch, in float64: what ranks with the same share have in common counts once."""
        return self.sum([value if self.answers else 0.0 for value in values])

    def max(self, values: Sequence[float]) -> list[float]:
        """Maxima over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return [float(value) for value in tensor.tolist()]
