"""Scorers as the driver sees them: replicas that take groups in turn, or ranks that score each group together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rlhf.cluster.actors import ActorGroup
from rlhf.tracking.spans import recorder
from rlhf.trainers.batch import learner_sample
from rlhf.trajectories import Group


class ScorerPool:
    """The ranks of one scorer. Together, they score every group, each a share of it; `method` is what they are asked.

    Calls of ranks together come in the same order on all of them, among those of a learner as well.
    """

    def __init__(self, group: ActorGroup, *, together: bool, deadline_s: float, method: str = "score") -> None:
        self.group = group
        self.deadline_s = deadline_s
        self._together = together
        self._method = method
        self._next = itertools.cycle(range(len(group)))
        self._queued = 0

    async def score(self, group: Group, what: str) -> Mapping[str, Any]:
        """For each sample of a group, by id, the reference to the scores that hold it."""
        samples = [learner_sample(trajectory) for trajectory in group.trajectories]
        self._queued += 1
        # A rank takes one group at a time, so the groups before this one count as well.
        deadline_s = self._queued * self.deadline_s
        try:
            limits: dict[str, Any] = {"num_returns": 2, "what": what, "deadline_s": deadline_s}
            if self._together:
                results = await self.group.call(self._method, samples, **limits)
            else:
                results = [await self.group.call_rank(next(self._next), self._method, samples, **limits)]
        finally:
            self._queued -= 1
        return shares(results)


def shares(results: list[Any]) -> dict[str, Any]:
    """From what ranks returned for `score`, `((spans, sample ids), reference)`: the reference for each sample."""
    found: dict[str, Any] = {}
    for (spans, ids), columns in results:
        recorder.absorb(spans)
        found.update(dict.fromkeys(ids, columns))
    return found
