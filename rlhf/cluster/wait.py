"""Every wait has a deadline and names what it waits for (invariant 1).

`wait`, `wait_all` and `first_failure` are for the driver's event loop, where a failure of an actor comes out as the
exception that `explain` makes of it: the remote traceback when the actor raised, or its role, rank, pid and last log
lines when it was killed. `get` is for synchronous code inside actors. Nothing else in the package calls `ray.get` or
awaits a reference, but for the supervisor, which watches actors instead of waiting for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """A wait reached its deadline. The message names what was awaited."""


# `rlhf.cluster.supervision` installs the translator of Ray's errors here; without one they pass as they are. It is a
# hook and not an import because this module is a common room and must not know the others.
_explain: Callable[[BaseException, str], BaseException] = lambda error, what: error  # noqa: E731


def set_explainer(explain: Callable[[BaseException, str], BaseException]) -> None:
    """Install the translator from Ray's errors to ours: `explain(error, what)` returns the exception to raise."""
    global _explain
    _explain = explain


async def wait(awaitable: Awaitable[T] | Any, *, what: str, deadline_s: float) -> T:
    """Await a Ray reference or a coroutine for at most `deadline_s` seconds.

    Raises `DeadlineExceeded` naming `what`, or the explained error of the actor.
    """
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await awaitable
    except Exception as error:
        if isinstance(error, TimeoutError) and scope.expired():
            raise DeadlineExceeded(f"{what}: not done after {deadline_s:g} s") from error
        told = explained(error, what)
        if told is error:
            raise
        raise told from error


def explained(error: BaseException, what: str) -> BaseException:
    """The exception to raise in place of `error`, which ended the wait for `what`."""
    return _explain(error, what)


async def wait_all(
    awaitables: Sequence[Awaitable[T] | Any], *, what: str | Sequence[str], deadline_s: float
) -> list[T]:
    """Await all of them together; the first failure is raised at once and the others are cancelled.

    `what` names all of them, or each.
    """
    names = [what] * len(awaitables) if isinstance(what, str) else what
    tasks = [
        asyncio.ensure_future(wait(awaitable, what=name, deadline_s=deadline_s))
        for awaitable, name in zip(awaitables, names, strict=True)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A `TaskGroup` that raises the first failure itself: its tasks end with the block, and a failure ends them all."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def get(references: Any, *, what: str, deadline_s: float) -> Any:
    """Fetch Ray references from synchronous code inside an actor, for at most `deadline_s` seconds."""
    import ray

    try:
        return ray.get(references, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"{what}: not done after {deadline_s:g} s") from error
