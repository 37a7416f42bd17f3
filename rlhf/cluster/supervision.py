"""Supervision: the first failure of any actor ends the run's work and says whose it was.

Invariants (each has a test)
- An actor that raised is reported with its role, rank and its own traceback, without Ray's frames.
- An actor that died is reported with its role, rank, pid, how it ended, and its last log lines.
- A death is noticed while nobody awaits that actor, and it wins over the error that it causes in a surviving peer.
- Actors that we end ourselves are not failures.

How an actor ended: Ray 2.60 says "connection error code 2. End of file" for SIGKILL and SIGSEGV alike (measured), so
the agent on the actor's node keeps a pidfd from its start and asks the kernel (Linux 6.15 or later). On older kernels
the message says that no exit status was reported.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf.cluster import wait
from rlhf.cluster.agent import Agents
from rlhf.cluster.process import describe_exit, exit_signal, tail

T = TypeVar("T")
log = logging.getLogger(__name__)

# How long to wait for the kernel's word on a process that Ray has reported dead: the raylet reaps it in milliseconds.
_STATUS_S = 2.0
# A survivor often notices its peer's death first ("connection closed by peer"): leave the true cause this long to come.
_CAUSE_S = 1.0
_CANCEL_S = 5.0

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ACTOR_ID = re.compile(r"actor_id[=:]\s*([0-9a-f]{32})")
_HEADER = re.compile(r"^.*ray::\S+ \(pid=.*\)$")
_FOREIGN_FRAME = re.compile(r'^  File ".*(/ray/|ray/_raylet\.pyx|/concurrent/futures/|/rlhf/cluster/(actors|wait)\.py)')
# Ray writes the stack of a fatal signal twice, the second time with this prefix.
_ECHO = re.compile(r"^\[.*\] logging\.cc:\d+: ")
_LOG_LINES = 20
_MARKERS = re.compile(r"^\s+[\^~\s]+$")


@dataclass(slots=True)
class Member:
    """One actor of a group, as the driver knows it. `hold` is a call that returns only by the actor's death."""

    role: str
    rank: int
    actor_id: str
    pid: int
    node: str
    hostname: str
    log: str | None
    agents: Agents
    hold: Any
    closing: bool = False

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}"


class ActorFailed(RuntimeError):
    """An actor raised, or is lost: it died or can't be reached any more.

    `signal` is the one that ended it, `cause` the exception that it raised, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str | None = None,
        rank: int | None = None,
        pid: int | None = None,
        signal: int | None = None,
        lost: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.role, self.rank, self.pid = role, rank, pid
        self.signal, self.lost, self.cause = signal, lost, cause


_members: dict[str, Member] = {}


def register(member: Member) -> None:
    """Let `explain` know an actor."""
    _members[member.actor_id] = member


def forget(members: Iterable[Member]) -> None:
    """Take actors out of the register."""
    for member in members:
        _members.pop(member.actor_id, None)


def explain(error: BaseException, what: str) -> BaseException:
    """Our exception for Ray's: `ActorFailed` where an actor raised or died, else `error` itself."""
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, exceptions.RayActorError):
        error = error.cause  # the task only passed on that another actor is dead
    if isinstance(error, exceptions.RayTaskError):
        return _raised(str(error), error.cause, what)
    if not isinstance(error, exceptions.RayActorError):
        return error
    if error.actor_init_failed:
        return _raised(str(error), None, what)
    member = _members.get(error.actor_id or "")
    if member is None:
        return ActorFailed(f"an actor was lost during {what}: {error}", lost=True)
    if isinstance(error, exceptions.ActorUnavailableError):
        # Its process may be there still, behind a broken connection; the calls that were under way are not.
        message = (
            f"{member} (pid {member.pid} on {member.hostname}) can't be reached during {_task(what, member)}: {error}"
        )
        return ActorFailed(message, role=member.role, rank=member.rank, pid=member.pid, lost=True)
    return _died(member, str(error), what)


def _raised(text: str, cause: BaseException | None, what: str) -> ActorFailed:
    found = _ACTOR_ID.search(text)
    member = _members.get(found.group(1)) if found else None
    trace = own_traceback(text)
    summary = f"{type(cause).__name__}: {cause}" if cause is not None else trace.rpartition("\n")[2]
    where = f" (pid {member.pid} on {member.hostname})" if member else ""
    return ActorFailed(
        f"{member or 'an actor'}{where} raised during {_task(what, member)}: {summary}\n{trace}",
        role=member.role if member else None,
        rank=member.rank if member else None,
        pid=member.pid if member else None,
        cause=cause,
    )


def _task(what: str, member: Member | None) -> str:
    """What was awaited, without the actor's name, which the message has already."""
    return what.removesuffix(f" ({member})")


def own_traceback(text: str) -> str:
    """The user's frames of a remote traceback as Ray prints it: without Ray's header, its frames, and stray markers."""
    kept: list[str] = ["Traceback (most recent call last):"]
    in_frame = skipping = False
    for line in _ANSI.sub("", text).splitlines():
        if _HEADER.match(line) or line.startswith("Traceback (most recent call last)"):
            continue
        if line.startswith('  File "'):
            in_frame, skipping = True, bool(_FOREIGN_FRAME.match(line))
        elif not line.startswith("    "):
            in_frame = skipping = False
        if skipping or (not in_frame and _MARKERS.match(line)):
            continue
        kept.append(line)
    return "\n".join(kept)


def _died(member: Member, ray_text: str, what: str) -> ActorFailed:
    status, lines = _post_mortem(member)
    message = f"{member} (pid {member.pid} on {member.hostname}) {describe_exit(status)}, during {_task(what, member)}."
    reason = ray_text.rpartition("\n")[2]
    if "its worker process has died" not in reason:  # then Ray knows more than that the connection is gone
        message += f"\n{reason}"
    if lines:
        message += f"\nLast lines of {member.log}:\n" + "\n".join(f"  | {line}" for line in lines)
    elif member.log:
        message += f"\n{member.log} is empty or can't be read from here."
    return ActorFailed(
        message, role=member.role, rank=member.rank, pid=member.pid, signal=exit_signal(status), lost=True
    )


def _post_mortem(member: Member) -> tuple[int | None, list[str]]:
    try:
        status = member.agents.ask(member.node, "status", member.pid, _STATUS_S)
        lines = member.agents.ask(member.node, "tail", member.log, 3 * _LOG_LINES) if member.log else []
    except Exception as error:  # the node may be gone as well; the report must still come out
        log.warning("%s: its node could not be asked how it ended: %s", member, error)
        status, lines = None, tail(Path(member.log), 3 * _LOG_LINES) if member.log else []
    return status, [line for line in lines if not _ECHO.match(line)][-_LOG_LINES:]


class Supervisor:
    """Watches actors, and guards work against their failures. Belongs to one event loop."""

    def __init__(self) -> None:
        self._failure: asyncio.Future[ActorFailed] | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    def watch(self, members: Iterable[Member], taken_care: Callable[[Member, ActorFailed], bool] | None = None) -> None:
        """Watch these actors from now on, until they are closed.

        `taken_care` is told of a failure first; it ends the work unless that returns True.
        """
        for member in members:
            task = asyncio.get_running_loop().create_task(self._watch(member, taken_care))
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    async def _watch(self, member: Member, taken_care: Callable[[Member, ActorFailed], bool] | None) -> None:
        try:
            # The one wait without a deadline: it is not waited for but watched, beside work that has one.
            await member.hold
        except Exception as error:
            if member.closing:
                return
            told = explain(error, "its work")
            failed = told if isinstance(told, ActorFailed) else ActorFailed(f"{member}: {told}", lost=True)
            failed.__cause__ = error
            if taken_care is not None and taken_care(member, failed):
                return
            future = self._future()
            if not future.done():
                future.set_result(failed)

    def _future(self) -> asyncio.Future[ActorFailed]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work`, but end it at once when a watched actor dies: then that actor's `ActorFailed` is raised.

        When the work itself fails, a death that comes out within a second is taken for the cause.
        """
        failure, task = self._future(), asyncio.ensure_future(_as_coroutine(work))
        try:
            either: set[asyncio.Future[Any]] = {task, failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not failure.done() and self._watchers and _error(task) is not None:
                await asyncio.wait({failure}, timeout=_CAUSE_S)
            if failure.done():
                raise failure.result()
            return task.result()
        finally:
            await _cancel(task)

    def stop(self) -> None:
        """Stop watching."""
        for task in self._watchers:
            if not task.get_loop().is_closed():
                task.cancel()


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
    if not task.done():
        log.warning("the work did not stop within %g s of being cancelled", _CANCEL_S)
    _error(task)  # marks its exception as seen


def install() -> None:
    """Make every wait of the package explain Ray's errors."""
    wait.set_explainer(explain)
