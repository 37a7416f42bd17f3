"""Collects a step's groups: draws prompts, has them answered and scored, until the step has what it needs.

Invariants
- A step is full when `prompts_per_step` groups are complete; with dynamic sampling only groups that can be learned from
  count, and each other one is replaced by a fresh prompt, up to the limit.
- Every sample that is drawn is in the ledger, and leaves `in_flight` by exactly one event: it came in, it failed, or it
  was given up. What is carried over stays in flight, and is drawn no second time.
- Groups are taken in the order in which they are complete; those of one moment by the order of their draws.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.algorithms.catalogue import needs_greedy
from rlhf.cluster.wait import first_failure
from rlhf.config.schema import Config, RolloutConfig
from rlhf.rollout.pool import GroupStream
from rlhf.rollout.types import Sampling
from rlhf.tracking.spans import now, span
from rlhf.trainers.batch import can_be_learned_from
from rlhf.trainers.scoring import ScoredGroup, score_group
from rlhf.trajectories import Group, Ledger, PromptDraw, Trajectory

if TYPE_CHECKING:
    from rlhf.data import PromptSampler
    from rlhf.trainers.roles import Roles


class NothingToLearnFrom(RuntimeError):
    """Dynamic sampling reached its limit before it had enough groups whose rewards differ."""


@dataclass(slots=True)
class Quota:
    """How many groups a step still needs and may still draw. Pure; one for each step."""

    wanted: int
    extra: int
    limit: int
    drawn: int = 0
    accepted: int = 0
    rejected: int = 0

    @staticmethod
    def of(rollout: RolloutConfig) -> Quota:
        """The quota of a step; without dynamic sampling no group is replaced."""
        wanted, extra = rollout.prompts_per_step, rollout.over_generation.groups
        dynamic = rollout.dynamic_sampling
        return Quota(wanted, extra, dynamic.max_factor * wanted if dynamic.enabled else wanted + extra)

    def to_draw(self) -> int:
        """Groups to begin now: as many as are missing beside those in the making, while the limit allows."""
        in_the_making = self.drawn - self.accepted - self.rejected
        missing = self.wanted + self.extra - self.accepted - in_the_making
        return max(0, min(missing, self.limit - self.drawn))

    @property
    def full(self) -> bool:
        """Whether the step has all its groups."""
        return self.accepted >= self.wanted

    @property
    def spent(self) -> bool:
        """Whether nothing is in the making and nothing may be drawn, while groups are missing."""
        return not self.full and self.drawn == self.accepted + self.rejected and self.to_draw() == 0


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's scored groups, those that can't be learned from included, and what it took to get them.

    `greedy` has the scored greedy response to each prompt, by group, where the estimator wants one; `seconds` is the
    time until the last group was complete.
    """

    scored: Sequence[ScoredGroup]
    greedy: Mapping[int, Trajectory] | None
    seconds: float
    figures: Mapping[str, float]


class Collector:
    """Draws, generates and scores the groups of one step after another; what is carried over is kept between them."""

    def __init__(self, config: Config, roles: Roles, prompts: PromptSampler, ledger: Ledger) -> None:
        self._config = config
        self._roles = roles
        self._prompts = prompts
        self._ledger = ledger
        self._samples = config.rollout.samples_per_prompt
        self._sampling = Sampling.for_training(config)
        self._carried: deque[PromptDraw] = deque()

    async def collect(self, step: int) -> Collected:
        """The groups of a step; raises `NothingToLearnFrom` at dynamic sampling's limit, where that is an error."""
        work = _Work(Quota.of(self._config.rollout))
        pool = self._roles.pool
        pool.activity.mark()
        started = now()
        stream = pool.open_stream(self._samples, self._sampling)
        greedy = pool.open_stream(1, self._sampling.at_temperature(0.0), purpose="greedy")
        try:
            async with first_failure() as tasks:
                with span("rollout", step):
                    await self._fill(work, stream, greedy, tasks, step)
                    seconds = now() - started
                    activity = pool.activity.metrics(self._roles.fleet.engines)
                    self._give_up(work, await stream.close())
                with span("score", step):
                    scored = [await task for task in work.scoring]
                    baselines = await self._baselines(greedy, {s.group.group_id for s in scored}, step)
        finally:
            await asyncio.gather(stream.close(), greedy.close())
        return Collected(scored, baselines, seconds, {**activity, **work.figures()})

    def state_dict(self) -> dict[str, Any]:
        """The draws that are carried over; what was generated of them is not kept, so indices are all."""
        return {"carried": [draw.draw_index for draw in self._carried]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry over what `state` says."""
        self._carried = deque(self._prompts.at(int(index)) for index in state["carried"])

    def finish(self) -> None:
        """The run ends: what is carried over will not be generated any more."""
        self._ledger.settle("discarded", len(self._carried) * self._samples, source="in_flight")
        self._carried.clear()

    async def _fill(
        self, work: _Work, stream: GroupStream, greedy: GroupStream, tasks: asyncio.TaskGroup, step: int
    ) -> None:
        """Begin groups and take them in until the quota is full; scoring goes on meanwhile, and beyond."""
        dynamic = self._config.rollout.dynamic_sampling
        coming: asyncio.Future[Group] | None = None
        try:
            while not work.quota.full and not work.quota.spent:
                self._begin(work.quota, stream, greedy)
                if coming is None and stream.pending:
                    coming = asyncio.ensure_future(anext(stream))
                awaited: set[asyncio.Future[Any]] = {*work.unjudged, *([coming] if coming is not None else [])}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if coming is not None and coming.done():
                    group, coming = coming.result(), None
                    self._take_in(group)
                    scoring = tasks.create_task(score_group(self._roles, group, step))
                    work.add(group, scoring, judged_by_rewards=dynamic.enabled)
                work.judge(self._config)
        finally:
            if coming is not None:
                coming.cancel()
        if work.quota.spent and (dynamic.at_limit == "error" or work.quota.accepted == 0):
            raise NothingToLearnFrom(work.describe(step, self._config.rollout))

    def _begin(self, quota: Quota, stream: GroupStream, greedy: GroupStream) -> None:
        """Begin the groups that are missing, carried ones first."""
        count = quota.to_draw()
        carried = [self._carried.popleft() for _ in range(min(count, len(self._carried)))]
        fresh = self._prompts.draw(count - len(carried))
        self._ledger.draw(len(fresh) * self._samples)
        quota.drawn += count
        stream.add([*carried, *fresh])
        if needs_greedy(self._config):
            greedy.add([*carried, *fresh])

    def _take_in(self, group: Group) -> None:
        self._ledger.buffer(len(group.trajectories))
        self._ledger.settle("failed", len(group.failures), source="in_flight")

    def _give_up(self, work: _Work, unfinished: Sequence[PromptDraw]) -> None:
        """The step is full: what is left is carried over or discarded, also what is finished and wasn't needed."""
        surplus = work.drop_unjudged()
        carry_over = self._config.rollout.over_generation.rest == "carry_over"
        # A group of which a sample has failed is over: that sample was settled, and would come a second time.
        again = [group for group in surplus if carry_over and not group.failures]
        self._ledger.give_back(len(again) * self._samples)
        self._ledger.settle("discarded", sum(len(group.trajectories) for group in surplus if group not in again))
        if carry_over:
            self._carried.extend(sorted([*unfinished, *(group.draw for group in again)], key=lambda d: d.draw_index))
        else:
            self._ledger.settle("discarded", len(unfinished) * self._samples, source="in_flight")

    async def _baselines(self, stream: GroupStream, groups: set[int], step: int) -> dict[int, Trajectory] | None:
        """The scored greedy response to each prompt of `groups`: baselines, not samples, and so not in the ledger.

        A prompt without one has none, where `rollout.on_error` lets that pass.
        """
        if not needs_greedy(self._config):
            return None
        found: dict[int, Trajectory] = {}
        async for group in stream:
            if group.group_id in groups:
                scored = await score_group(self._roles, group, step, reference=False)
                found.update((trajectory.group_id, trajectory) for trajectory in scored.group.trajectories)
                groups.discard(group.group_id)
            if not groups:
                break
        return found


class _Work:
    """One step's collection as it goes on: the quota, and the scoring of every group that came in."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.scoring: list[asyncio.Task[ScoredGroup]] = []
        self.unjudged: dict[asyncio.Task[ScoredGroup], Group] = {}

    def add(self, group: Group, scoring: asyncio.Task[ScoredGroup], *, judged_by_rewards: bool) -> None:
        """A group came in; it counts now, or once its rewards are known."""
        self.scoring.append(scoring)
        if judged_by_rewards:
            self.unjudged[scoring] = group
        else:
            self.quota.accepted += 1

    def judge(self, config: Config) -> None:
        """Count the groups whose rewards have become known, until the quota is full."""
        for task in [task for task in self.unjudged if task.done()]:
            if self.quota.full:
                return
            del self.unjudged[task]
            if can_be_learned_from(task.result(), config):
                self.quota.accepted += 1
            else:
                self.quota.rejected += 1

    def drop_unjudged(self) -> list[Group]:
        """Groups that came in and that the step doesn't need; their scoring is given up."""
        surplus = list(self.unjudged.values())
        for task in self.unjudged:
            task.cancel()
            self.scoring.remove(task)
        self.unjudged.clear()
        return surplus

    def figures(self) -> dict[str, float]:
        """`rollout/...`: groups drawn in this step, and those that were replaced."""
        return {
            "rollout/groups_drawn": float(self.quota.drawn),
            "rollout/groups_replaced": float(self.quota.rejected),
        }

    def describe(self, step: int, rollout: RolloutConfig) -> str:
        """What the limit was, what was found, and what can be done."""
        quota = self.quota
        return (
            f"step {step}: of {quota.drawn} groups only {quota.accepted} had rewards that differ, and "
            f"{quota.wanted} are needed. rollout.dynamic_sampling.max_factor {rollout.dynamic_sampling.max_factor} "
            "allows no more draws. Raise it, set rollout.dynamic_sampling.at_limit: train, or use prompts that are "
            "neither solved always nor never"
        )
