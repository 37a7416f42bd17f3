"""Waits: the first failure is the one that is raised, at once, and nothing else goes on."""

import asyncio

import pytest

from rlhf.cluster.wait import DeadlineExceeded, first_failure, wait, wait_all


async def fail(message, after=0.0):
    await asyncio.sleep(after)
    raise ValueError(message)


async def test_a_wait_ends_at_its_deadline_and_names_what_it_waited_for():
    with pytest.raises(DeadlineExceeded, match=r"the tea: not done after 0\.01 s"):
        await wait(asyncio.sleep(60), what="the tea", deadline_s=0.01)


async def test_a_timeout_of_the_awaited_itself_is_not_taken_for_the_deadline():
    async def inner():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        await wait(inner(), what="it", deadline_s=60)
    assert not isinstance(caught.value, DeadlineExceeded)


async def test_the_first_failure_of_several_is_raised_without_waiting_for_the_others():
    with pytest.raises(ValueError, match="second"):
        await wait_all([asyncio.sleep(60), fail("second")], what="both", deadline_s=60)


async def test_a_failing_task_ends_the_block_and_the_other_tasks():
    ended = asyncio.Event()

    async def other():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="first"):
        async with first_failure() as tasks:
            tasks.create_task(other())
            tasks.create_task(fail("first", 0.01))
            await asyncio.sleep(60)
    assert ended.is_set()


async def test_a_failure_in_the_block_ends_its_tasks():
    with pytest.raises(ValueError, match="mine"):
        async with first_failure() as tasks:
            task = tasks.create_task(asyncio.sleep(60))
            await fail("mine", 0.01)
    assert task.cancelled()
