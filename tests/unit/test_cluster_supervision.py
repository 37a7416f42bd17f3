"""Supervision without Ray: what guard does with failures, and how remote tracebacks are cleaned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhf.cluster.agent import Agents
from rlhf.cluster.supervision import ActorFailed, Member, Supervisor, explain, forget, own_traceback, register
from rlhf.cluster.wait import DeadlineExceeded, set_explainer, wait, wait_all


def member(hold: Any, rank: int = 1) -> Member:
    return Member("policy", rank, "a" * 32, 1234, "node", "host", None, Agents("node"), hold)


async def test_a_death_ends_work_that_waits_for_another_actor() -> None:
    supervisor, hold = Supervisor(), asyncio.get_running_loop().create_future()
    supervisor.watch([member(hold)])
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            cancelled.set()

    asyncio.get_running_loop().call_soon(hold.set_exception, OSError("connection lost"))
    with pytest.raises(ActorFailed, match="policy rank 1"):
        await supervisor.guard(work())
    assert cancelled.is_set()


async def test_a_death_wins_over_the_error_that_it_causes_in_a_peer() -> None:
    supervisor, hold = Supervisor(), asyncio.get_running_loop().create_future()
    supervisor.watch([member(hold)])

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.05, hold.set_exception, OSError("died"))
        raise RuntimeError("rank 0: connection closed by peer")

    with pytest.raises(ActorFailed, match="policy rank 1"):
        await supervisor.guard(work())


async def test_an_error_without_a_death_comes_out_as_it_is() -> None:
    supervisor = Supervisor()

    async def work() -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await supervisor.guard(work())


async def test_the_result_of_good_work_comes_out() -> None:
    supervisor = Supervisor()
    supervisor.watch([member(asyncio.get_running_loop().create_future())])
    assert await supervisor.guard(asyncio.sleep(0, "done")) == "done"
    supervisor.stop()


async def test_an_actor_that_we_end_is_no_failure() -> None:
    supervisor, hold = Supervisor(), asyncio.get_running_loop().create_future()
    ours = member(hold)
    supervisor.watch([ours])
    ours.closing = True
    hold.set_exception(OSError("killed by ray.kill"))
    assert await supervisor.guard(asyncio.sleep(0.05, "done")) == "done"


async def test_a_death_between_two_pieces_of_work_fails_the_next() -> None:
    supervisor, hold = Supervisor(), asyncio.get_running_loop().create_future()
    supervisor.watch([member(hold)])
    await supervisor.guard(asyncio.sleep(0))
    hold.set_exception(OSError("died"))
    await asyncio.sleep(0.01)
    with pytest.raises(ActorFailed):
        await supervisor.guard(asyncio.sleep(0))


def test_a_remote_traceback_keeps_the_users_frames_only() -> None:
    text = "\n".join(
        [
            "\x1b[36mray::policy-0.update()\x1b[39m (pid=7, ip=10.0.0.1, actor_id=65dfff, repr=<x>)",
            "           ^^^^^^^^^^^^^^^^^^^",
            '  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 401, in __get_result',
            "    raise self._exception",
            '  File "/home/me/reward.py", line 3, in score',
            "    return 1 / 0",
            "           ~~^~~",
            "ZeroDivisionError: division by zero",
            "    said with an indent",
        ]
    )
    assert own_traceback(text).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/home/me/reward.py", line 3, in score',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
        "    said with an indent",
    ]


async def test_a_deadline_names_what_was_awaited() -> None:
    with pytest.raises(DeadlineExceeded, match=r"policy update: not done after 0\.01 s"):
        await wait(asyncio.sleep(10), what="policy update", deadline_s=0.01)


async def test_a_timeout_raised_by_the_work_is_not_taken_for_our_deadline() -> None:
    async def work() -> None:
        raise TimeoutError("socket timed out")

    with pytest.raises(TimeoutError, match="socket timed out") as raised:
        await wait(work(), what="policy update", deadline_s=10)
    assert not isinstance(raised.value, DeadlineExceeded)


async def test_a_timeout_raised_by_an_actor_is_explained_too() -> None:
    async def work() -> None:
        raise TimeoutError("socket timed out")

    set_explainer(lambda error, what: RuntimeError(f"{what}: {error}"))
    try:
        with pytest.raises(RuntimeError, match="policy update: socket timed out"):
            await wait(work(), what="policy update", deadline_s=10)
    finally:
        set_explainer(lambda error, what: error)


async def test_each_of_several_waits_can_have_its_own_name() -> None:
    with pytest.raises(DeadlineExceeded, match="rank 1"):
        await wait_all([asyncio.sleep(0), asyncio.sleep(10)], what=["rank 0", "rank 1"], deadline_s=0.01)


def test_an_actor_behind_a_broken_connection_is_lost_like_a_dead_one() -> None:
    from ray.exceptions import ActorUnavailableError

    one = member(None)
    register(one)
    try:
        failed = explain(ActorUnavailableError("socket closed", bytes.fromhex(one.actor_id)), "update of step 3")
    finally:
        forget([one])
    assert isinstance(failed, ActorFailed) and failed.lost
    assert (failed.role, failed.rank, failed.pid) == ("policy", 1, 1234)
    assert str(failed).startswith("policy rank 1 (pid 1234 on host) can't be reached during update of step 3: ")
