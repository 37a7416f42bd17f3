"""The reward actor as the driver sees it: groups are scored by it, and when it is lost, by another in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.supervision import ActorFailed
from rlhf.cluster.wait import DeadlineExceeded
from rlhf.config.schema import RewardConfig
from rlhf.rewards.types import SampleScore
from rlhf.tracking.spans import recorder
from rlhf.trainers.recovery import is_loss
from rlhf.trajectories import Group

# Fetching the sampled ids and making texts of them.
_TEXTS_S = 60.0
# A killed reward worker is replaced before the next call: imports of a user's module included.
_REBOOT_S = 120.0


class RewardRole:
    """Scores groups by `functions` reward functions a sample.

    A lost actor is started again `restarts` times, when the next scores are due; what it had been asked is asked again,
    so a function may see a sample twice. After that its loss is the run's.
    """

    def __init__(
        self, group: ActorGroup, config: RewardConfig, *, functions: int, restarts: int, say: Callable[[str], None]
    ) -> None:
        self._group = group
        self._slowest_s = functions * (config.timeout_s + _REBOOT_S)
        self._restarts = restarts
        self._restarted = 0
        self._say = say
        self._queued = 0
        # Why there is no actor any more.
        self._gone: ActorFailed | DeadlineExceeded | None = None
        self._one_at_a_time = asyncio.Lock()
        self._take_care()

    async def score(self, group: Group, step: int) -> list[SampleScore]:
        """Rewards of a group's samples, in their order.

        The functions' own deadlines are kept in the actor; the one here is for all calls that queue before, each of
        which may end with a killed worker. Raises what the actor raised, and a loss that is not made good.
        """
        self._queued += 1
        try:
            while True:
                async with self._one_at_a_time:  # none is asked while it is started
                    asked = self._group.handles[0]
                if self._gone is not None:
                    raise self._gone
                try:
                    return await self._ask(group, step)
                except (ActorFailed, DeadlineExceeded) as error:
                    if not is_loss(error):
                        raise
                    await self._replace(asked, error)
        finally:
            self._queued -= 1

    async def _ask(self, group: Group, step: int) -> list[SampleScore]:
        result = await self._group.call_rank(
            0,
            "score",
            group.draw.prompt,
            group.trajectories,
            step,
            what=f"rewards of group {group.group_id}",
            deadline_s=_TEXTS_S + self._queued * self._slowest_s,
        )
        recorder.absorb(result.spans, step)
        scores: list[SampleScore] = result.scores
        return scores

    async def _replace(self, lost: Any, error: ActorFailed | DeadlineExceeded) -> None:
        """Have another actor in the place of the lost one, unless a call beside this one saw to that."""
        async with self._one_at_a_time:
            if self._group.handles[0] is not lost:
                return
            while is_loss(error) and self._restarted < self._restarts:
                self._restarted += 1
                self._say(f"restart {self._restarted} of {self._restarts} of the reward actor: {error}")
                try:
                    await self._group.replace(0)
                except (ActorFailed, DeadlineExceeded) as failed:
                    error = failed
                else:
                    self._take_care()
                    return
            self._gone = error
            raise error

    def _take_care(self) -> None:
        """While there are restarts left, a loss does not end the run by itself: the call that meets it comes here."""
        self._group.on_lost = (lambda rank, failure: None) if self._restarted < self._restarts else None
