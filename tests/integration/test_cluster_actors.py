"""Actor groups, placement and supervision on real Ray, with tiny actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.needs import needs
from rlhf.cluster.placement import Placement
from rlhf.cluster.session import Session, open_session
from rlhf.cluster.supervision import ActorFailed, Supervisor
from rlhf.cluster.wait import DeadlineExceeded, set_explainer
from rlhf.config.schema import RewardConfig
from rlhf.rewards import RewardInput, dump_functions
from rlhf.rewards.actor import RewardActor
from rlhf.trainers.reward_role import RewardRole
from rlhf.trajectories import Group
from tests.integration.cluster_actors import SHAPE, AsyncWorker, alive, config, workers
from tests.tiny import make_tiny_tokenizer
from tests.unit.test_trainer_batch import scored

HAS_EXIT_STATUS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.fixture(scope="module")
def open_cluster() -> Iterator[Session]:
    """A session for two learners and an engine, on a cluster of its own."""
    session = open_session(config(ranks=2, engines=1), SHAPE)
    yield session
    session.close()
    set_explainer(lambda error, what: error)


@pytest.fixture
async def session(open_cluster: Session) -> AsyncIterator[Session]:
    """The session with its placement reserved; a test's groups are ended after it."""
    open_cluster.supervisor = Supervisor()  # it belongs to the event loop of one test
    await open_cluster.placement.reserve(open_cluster.needs, 60)
    yield open_cluster
    open_cluster.supervisor.stop()
    for group in open_cluster._groups:
        await group.close()
    open_cluster._groups.clear()
    open_cluster.placement.remove()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_actor_is_named_while_another_is_awaited(
    session: Session, tmp_path: Path, number: signal.Signals
) -> None:
    group = await workers(session, tmp_path)
    pid = group.members[1].pid
    asyncio.get_running_loop().call_later(0.3, os.kill, pid, number)
    with pytest.raises(ActorFailed) as failed:
        await session.supervisor.guard(group.call_rank(0, "sleep", 300, what="policy update", deadline_s=600))
    assert (failed.value.role, failed.value.rank, failed.value.pid, failed.value.lost) == ("policy", 1, pid, True)
    message = str(failed.value)
    assert f"policy rank 1 (pid {pid} on" in message
    assert "constructed rank 1" in message  # the last log lines
    assert (failed.value.signal == number) is HAS_EXIT_STATUS
    assert (f"killed by {number.name}, signal {number.value}" in message) is HAS_EXIT_STATUS
    if number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in message


async def test_the_killed_actor_is_named_and_not_the_peer_that_it_took_along(session: Session) -> None:
    group = await workers(session)
    pid = group.members[1].pid
    asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
    with pytest.raises(ActorFailed) as failed:
        await session.supervisor.guard(group.call_rank(0, "fail_when_gone", pid, what="update", deadline_s=60))
    assert (failed.value.rank, failed.value.lost) == (1, True)


async def test_a_call_to_a_killed_actor_names_it_without_a_guard(session: Session) -> None:
    group = await workers(session)
    os.kill(group.members[0].pid, signal.SIGKILL)
    with pytest.raises(ActorFailed, match=r"policy rank 0 .*, during policy update\."):
        await group.call("sleep", 60, what="policy update", deadline_s=120)


async def test_an_exception_gives_the_actors_own_traceback_at_once(session: Session) -> None:
    group = await workers(session)
    with pytest.raises(ActorFailed) as failed:
        await group.call("fail_at", 1, what="policy update", deadline_s=120)
    message = str(failed.value)
    assert message.startswith("policy rank 1 (pid ")
    assert "raised during policy update: ValueError: loss is NaN" in message
    assert "cluster_actors.py" in message and 'raise ValueError("loss is NaN")' in message
    assert "/ray/" not in message and "\x1b" not in message
    assert isinstance(failed.value.cause, ValueError) and not failed.value.lost


async def test_an_exception_in_a_constructor_ends_the_other_ranks(session: Session) -> None:
    with pytest.raises(ActorFailed, match=r"policy rank 1 .* raised during start of policy rank 1: KeyError") as failed:
        await workers(session, rank1="raise")
    assert "cluster_actors.py" in str(failed.value)
    (group,) = session._groups
    await group.close()
    assert not any(alive(member.pid) for member in group.members)


async def test_a_death_in_a_constructor_is_named_with_its_exit_code(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ActorFailed) as failed:
        await workers(session, tmp_path, rank0="exit")
    message = str(failed.value)
    assert message.startswith("policy rank 0 (pid ")
    assert "constructed rank 0" in message
    assert ("left with exit code 3" in message) is HAS_EXIT_STATUS


async def test_actors_know_their_rank_environment_and_log(session: Session, tmp_path: Path) -> None:
    group = await workers(session, tmp_path)
    # The constructor runs in the thread of the methods.
    assert await group.call("whoami", what="whoami", deadline_s=30) == [(0, "set", True), (1, "set", True)]
    assert [member.log for member in group.members] == [str(tmp_path / f"policy-{rank}.log") for rank in (0, 1)]
    assert (tmp_path / "policy-0.log").read_text() == "constructed rank 0\n"


async def test_a_busy_actor_answers_ping_and_promises_a_port(session: Session) -> None:
    group = await workers(session)
    busy = group.refs("sleep", 120)
    answers = await group.ping()
    assert [answer["pid"] for answer in answers] == [member.pid for member in group.members]
    ip, port = await group.meeting_address(1)
    assert ip == answers[1]["ip"] and 1024 <= port < 65536
    assert ray.wait(busy, timeout=0)[0] == []


async def test_an_async_actor_takes_many_calls_in_its_own_loop(session: Session) -> None:
    group = await ActorGroup.create(
        "rollout",
        AsyncWorker,
        1,
        session=session,
        args_for_rank=lambda rank: ((), {}),
        placement=session.placement.slots["rollout"],
        deadline_s=60,
    )
    calls = [group.call_rank(0, "meet", 200, what="meet", deadline_s=60) for _ in range(200)]
    assert all(await asyncio.gather(*calls))
    header, columns = await group.call_rank(0, "pair", what="pair", deadline_s=30, num_returns=2)
    assert header == "header"
    assert ray.get(columns, timeout=30) == [1, 2, 3]


async def test_closing_a_group_ends_what_its_actors_started(session: Session) -> None:
    group = await workers(session)
    children = await group.call("start_child", what="children", deadline_s=30)
    assert all(alive(child) for child in children)
    await group.close()
    assert not any(alive(pid) for pid in [*children, *(member.pid for member in group.members)])
    # And that is no failure of anything.
    assert await session.supervisor.guard(asyncio.sleep(0.2, "fine")) == "fine"


async def test_learners_share_a_placement_group_and_an_engine_has_its_own(session: Session) -> None:
    policy, rollout = session.placement.slots["policy"], session.placement.slots["rollout"]
    assert [slot.bundle for slot in policy] == [0, 1]
    assert policy[0].group is policy[1].group
    assert rollout[0].group is not policy[0].group


async def test_placement_that_stays_pending_ends_at_the_deadline_with_numbers(session: Session) -> None:
    # All three slots are taken by the session's own placement.
    second = Placement()
    with pytest.raises(DeadlineExceeded) as pending:
        await second.reserve(needs(config(ranks=1, engines=1), SHAPE.policy), deadline_s=0.3)
    message = str(pending.value)
    assert "not placed after 0.3 s" in message
    assert "policy needs 1 CPU" in message and "rollout engine 0 needs 1 CPU" in message
    assert "The cluster has 3 CPU of which 0 are free" in message
    groups = ray.util.placement_group_table().values()
    assert sorted(group["state"] for group in groups if group["state"] != "REMOVED") == ["CREATED", "CREATED"]


async def test_slots_and_ranks_must_agree(session: Session) -> None:
    with pytest.raises(ValueError, match="3 ranks, but 2 slots"):
        await ActorGroup.create(
            "policy",
            AsyncWorker,
            3,
            session=session,
            args_for_rank=lambda rank: ((), {}),
            placement=session.placement.slots["policy"],
            deadline_s=60,
        )


async def test_a_lost_actor_that_somebody_looks_after_does_not_end_the_work_and_is_replaced(session: Session) -> None:
    group = await workers(session)
    lost: asyncio.Queue[tuple[int, ActorFailed]] = asyncio.Queue()
    group.on_lost = lambda rank, failure: lost.put_nowait((rank, failure))
    old = group.members[1].pid

    async def work() -> list[int]:
        os.kill(old, signal.SIGKILL)
        rank, failure = await asyncio.wait_for(lost.get(), 30)
        assert (rank, failure.rank, failure.lost) == (1, 1, True)
        await group.replace(rank)
        return [(await group.call_rank(r, "whoami", what="who", deadline_s=60))[0] for r in (0, 1)]

    assert await session.supervisor.guard(work()) == [0, 1]
    new = [member.pid for member in group.members if member.rank == 1]
    assert new != [old] and not alive(old)
    # The one in its place is watched like the first.
    os.kill(new[0], signal.SIGKILL)
    assert (await asyncio.wait_for(lost.get(), 30))[0] == 1


async def test_ending_one_actor_ends_what_it_started_and_is_no_failure(session: Session) -> None:
    group = await workers(session)
    child = await group.call_rank(1, "start_child", what="child", deadline_s=60)
    await group.end(1)
    assert not alive(child)
    assert (await session.supervisor.guard(group.call_rank(0, "whoami", what="who", deadline_s=60)))[0] == 0


def with_references(group: Group) -> Group:
    """The group with its columns in the object store, as engines leave them."""
    return replace(group, trajectories=tuple(replace(t, columns=ray.put(t.columns)) for t in group.trajectories))


async def test_what_a_killed_reward_actor_was_asked_is_asked_of_another(session: Session, tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    asked = tmp_path / "asked"

    def hangs_at_first(samples: list[RewardInput]) -> list[float]:
        if not asked.exists():
            asked.touch()
            time.sleep(600)
        return [7.0 for _ in samples]

    config = RewardConfig(timeout_s=300)
    group = await ActorGroup.create(
        "reward",
        RewardActor,
        1,
        session=session,
        args_for_rank=lambda rank: ((config, str(tmp_path), dump_functions({"f": hangs_at_first})), {}),
        deadline_s=60,
    )
    said: list[str] = []
    rewards = RewardRole(group, config, functions=1, restarts=1, say=said.append)
    pid = group.members[0].pid

    def kill_when_asked() -> None:
        deadline = time.monotonic() + 60
        while not asked.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    asks = [rewards.score(with_references(scored(number, [0.0, 0.0]).group), step=1) for number in range(3)]
    *found, _ = await session.supervisor.guard(asyncio.gather(*asks, asyncio.to_thread(kill_when_asked)))
    assert [[one.reward for one in scores] for scores in found] == [[7.0, 7.0]] * 3
    assert len(said) == 1 and f"reward rank 0 (pid {pid} on" in said[0]
    assert [member.rank for member in group.members] == [0] and group.members[0].pid != pid
