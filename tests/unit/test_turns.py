"""Announced requests come in one after another, in the order announced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlhf.rollout.turns import Turns


class Engine:
    """Notes who came in, in which order, and whether the batch was complete by then."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.seen: list[str] = []

    async def announce(self, ids: Sequence[str]) -> None:
        batch = self.turns.announce(ids)
        async with self.turns.alone(batch):
            self.seen.append("open")
            await batch.complete()
            self.seen.append("complete")

    async def request(self, request_id: str, error: Exception | None = None) -> None:
        async with self.turns.turn(request_id):
            await asyncio.sleep(0)
            if error is not None:
                raise error
            self.seen.append(request_id)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("arrival", ["abc", "cba", "bca"])
async def test_requests_come_in_as_announced_whatever_order_they_arrive_in(arrival: str) -> None:
    engine = Engine()
    batch = asyncio.create_task(engine.announce("abc"))
    await settle()
    requests = [asyncio.create_task(engine.request(r)) for r in arrival]
    await asyncio.gather(batch, *requests)
    assert engine.seen == ["open", "a", "b", "c", "complete"]


async def test_a_request_waits_for_one_before_it_that_has_not_arrived() -> None:
    engine = Engine()
    batch = asyncio.create_task(engine.announce("ab"))
    second = asyncio.create_task(engine.request("b"))
    await settle()
    assert engine.seen == ["open"]
    await asyncio.gather(engine.request("a"), second, batch)
    assert engine.seen == ["open", "a", "b", "complete"]


async def test_a_batch_waits_for_the_one_before_it() -> None:
    engine = Engine()
    first, second = (asyncio.create_task(engine.announce(ids)) for ids in ("a", "b"))
    await settle()
    later = asyncio.create_task(engine.request("b"))
    await settle()
    assert engine.seen == ["open"]
    await asyncio.gather(engine.request("a"), later, first, second)
    assert engine.seen == ["open", "a", "complete", "open", "b", "complete"]


async def test_one_that_was_never_announced_passes_at_once() -> None:
    engine = Engine()
    batch = asyncio.create_task(engine.announce("a"))
    await settle()
    await engine.request("z")
    assert engine.seen == ["open", "z"]
    await asyncio.gather(engine.request("a"), batch)


@pytest.mark.parametrize("how", ["skipped", "fails", "cancelled"])
async def test_one_that_does_not_come_in_holds_up_nobody(how: str) -> None:
    engine = Engine()
    batch = asyncio.create_task(engine.announce("ab"))
    second = asyncio.create_task(engine.request("b"))
    await settle()
    if how == "skipped":
        engine.turns.skip("a")
    elif how == "fails":
        with pytest.raises(ValueError, match="too long"):
            await engine.request("a", ValueError("too long"))
    else:
        blocked = asyncio.create_task(engine.request("a"))
        await asyncio.sleep(0)
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
    await asyncio.gather(second, batch)
    assert engine.seen == ["open", "b", "complete"]


async def test_a_batch_that_ends_before_it_is_complete_keeps_nobody_waiting() -> None:
    engine = Engine()
    batch = asyncio.create_task(engine.announce("ab"))
    second = asyncio.create_task(engine.request("b"))
    await settle()
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    await second
    assert engine.seen == ["open", "b"]


async def test_an_id_can_be_announced_again_once_it_is_in_and_not_before() -> None:
    engine = Engine()
    first = asyncio.create_task(engine.announce("a"))
    await settle()
    with pytest.raises(ValueError, match="'a'"):
        await engine.announce("ba")
    await asyncio.gather(engine.request("a"), first)
    await asyncio.gather(engine.announce("a"), engine.request("a"))
    assert engine.seen == ["open", "a", "complete", "open", "a", "complete"]
