"""The reward actor as the driver sees it: what is done when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.cluster.supervision import ActorFailed
from rlhf.cluster.wait import DeadlineExceeded
from rlhf.config.schema import RewardConfig
from rlhf.rewards.types import SampleScore, ScoreResult
from rlhf.trainers.reward_role import RewardRole
from tests.unit.test_trainer_batch import scored

GROUPS = [scored(number, [0.0]).group for number in range(3)]
LOST = ActorFailed("reward rank 0 was killed", lost=True)


class Actors:
    """A group of one actor; the first ones fail every call with what is given, in turn. Starts fail likewise."""

    def __init__(self, *failures: Exception, starts: tuple[Exception, ...] = ()) -> None:
        self._failures, self._starts = list(failures), list(starts)
        self.handles: list[Any] = [0]
        self.on_lost: Callable[[int, Any], None] | None = None
        self.started: list[int] = []
        self.starting = asyncio.Event()

    async def call_rank(self, rank: int, method: str, prompt: Any, trajectories: Any, *args: Any, **limits: Any) -> Any:
        actor = self.handles[rank]
        await asyncio.sleep(0)
        if actor < len(self._failures):
            raise self._failures[actor]
        return ScoreResult([SampleScore(float(t.group_id), {}) for t in trajectories], [])

    async def replace(self, rank: int) -> None:
        self.handles[rank] = None
        self.starting.set()
        await asyncio.sleep(0)
        if self._starts:
            raise self._starts.pop(0)
        self.started.append(rank)
        self.handles[rank] = len(self.started)


def role(actors: Actors, restarts: int, say: Callable[[str], None] = lambda text: None) -> RewardRole:
    return RewardRole(actors, RewardConfig(), functions=1, restarts=restarts, say=say)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [LOST, DeadlineExceeded("rewards of group 0: not done after 1 s")])
async def test_calls_that_lost_their_actor_are_asked_again_of_one_new_actor(loss: Exception) -> None:
    actors, said = Actors(loss), list[str]()
    rewards = role(actors, 2, said.append)
    found = await asyncio.gather(*(rewards.score(group, 1) for group in GROUPS))
    assert [one.reward for (one,) in found] == [0.0, 1.0, 2.0]
    assert actors.started == [0]
    assert said == [f"restart 1 of 2 of the reward actor: {loss}"]


async def test_a_loss_is_the_runs_when_the_restarts_are_used_up() -> None:
    actors = Actors(LOST, LOST)
    rewards = role(actors, 1)
    assert actors.on_lost is not None
    with pytest.raises(ActorFailed, match="was killed"):
        await rewards.score(GROUPS[0], 1)
    assert actors.started == [0] and actors.on_lost is None


async def test_without_restarts_a_loss_is_the_runs_at_once() -> None:
    actors = Actors(LOST)
    rewards = role(actors, 0)
    assert actors.on_lost is None
    with pytest.raises(ActorFailed, match="was killed"):
        await rewards.score(GROUPS[0], 1)
    assert actors.started == []


async def test_what_a_reward_function_raised_is_not_asked_again() -> None:
    actors = Actors(ActorFailed("reward rank 0 raised: RewardError", cause=ValueError()))
    with pytest.raises(ActorFailed, match="RewardError"):
        await role(actors, 5).score(GROUPS[0], 1)
    assert actors.started == []


async def test_an_actor_that_is_lost_at_its_start_is_started_again() -> None:
    actors, said = Actors(LOST, starts=(LOST, LOST)), list[str]()
    rewards = role(actors, 3, said.append)
    found = await asyncio.gather(*(rewards.score(group, 1) for group in GROUPS))
    assert [one.reward for (one,) in found] == [0.0, 1.0, 2.0]
    assert len(said) == 3


async def test_a_call_that_comes_while_the_actor_is_started_waits_for_it() -> None:
    actors = Actors(LOST)
    rewards = role(actors, 1)
    first = asyncio.ensure_future(rewards.score(GROUPS[0], 1))
    await actors.starting.wait()
    (late,) = await rewards.score(GROUPS[1], 1)
    assert late.reward == 1.0
    assert [one.reward for one in await first] == [0.0]


@pytest.mark.parametrize("start", [LOST, ActorFailed("reward rank 0 raised: KeyError", cause=KeyError())])
async def test_when_none_can_be_started_all_calls_fail_alike(start: ActorFailed) -> None:
    actors = Actors(LOST, starts=(start,))
    rewards = role(actors, 1)
    found = await asyncio.gather(*(rewards.score(group, 1) for group in GROUPS), return_exceptions=True)
    assert found == [start] * 3
    with pytest.raises(ActorFailed) as failed:
        await rewards.score(GROUPS[0], 1)
    assert failed.value is start
