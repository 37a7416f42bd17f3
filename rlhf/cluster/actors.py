"""Groups of Ray actors made from plain classes.

Invariants (each has a test)
- An actor's class knows nothing of Ray. Ours is put around it: it directs output to `<log_dir>/<role>-<rank>.log`, ties
  the process to its parent, and answers `hello` while the class's own methods compute.
- The class is constructed after the process has reported its pid, so a death in the constructor is named as well.
- Starting has a deadline. If one rank fails to start, the others are ended and the failure is raised.
- A call fails at the first rank that fails, at once.

Methods of a class without coroutines run one at a time in one thread, the constructor too; it isn't the main thread.
Those of a class with coroutines, and its constructor, run in one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.cluster.placement import Slot
from rlhf.cluster.ports import hold_port
from rlhf.cluster.process import die_with_parent, redirect_output
from rlhf.cluster.reaper import join_run
from rlhf.cluster.supervision import ActorFailed, Member, forget, register
from rlhf.cluster.wait import wait, wait_all
from rlhf.tracking.spans import set_role

if TYPE_CHECKING:
    from rlhf.cluster.session import Session

log = logging.getLogger(__name__)

_CONTROL = "control"
_CONTROL_THREADS = 4
# An async actor takes as many calls as a step has samples; a sync one takes one.
_ASYNC_CONCURRENCY = 1000
_END_GRACE_S = 5.0
# The agent of another node may have to be started first.
_END_S = 4 * _END_GRACE_S

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What an actor's process is told before its class is constructed."""

    role: str
    rank: int
    log: str | None
    marker: str


def _set_up_process(settings: HostSettings) -> dict[str, Any]:
    """Prepare the actor's process; returns who and where it is."""
    import ray

    die_with_parent(signal.SIGKILL)
    join_run(settings.marker)
    set_role(settings.role)
    redirected = settings.log is not None and redirect_output(Path(settings.log))
    context = ray.get_runtime_context()
    return {
        "pid": os.getpid(),
        "node": context.get_node_id(),
        "hostname": socket.gethostname(),
        "ip": ray.util.get_node_ip_address(),
        "log": settings.log if redirected else None,
    }


class _Host:
    """Put in front of a class without coroutines."""

    def __init__(self, settings: HostSettings) -> None:
        self._rlhf_identity = _set_up_process(settings)

    def rlhf_hello(self) -> dict[str, Any]:
        return self._rlhf_identity

    def rlhf_hold_port(self) -> int:
        return hold_port()

    def rlhf_hold(self) -> None:
        threading.Event().wait()

    def rlhf_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(*args, **kwargs)


class _AsyncHost:
    """Put in front of a class with coroutines."""

    def __init__(self, settings: HostSettings) -> None:
        self._rlhf_identity = _set_up_process(settings)

    async def rlhf_hello(self) -> dict[str, Any]:
        return self._rlhf_identity

    async def rlhf_hold_port(self) -> int:
        return hold_port()

    async def rlhf_hold(self) -> None:
        # A class that can die without its process (an engine whose child is gone) says so by raising in `watch`.
        watch = getattr(self, "watch", None)
        await (watch() if watch is not None else asyncio.Event().wait())

    async def rlhf_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(*args, **kwargs)


def _has_coroutines(plain: type) -> bool:
    return any(
        inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
        for _, member in inspect.getmembers(plain, inspect.isfunction)
    )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How the actors of a group are made, so that one of them can be made again."""

    plain: type
    args_for_rank: Callable[[int], Arguments]
    deadline_s: float
    placement: Sequence[Slot] | None
    env: Mapping[str, str]
    log_dir: Path | None

    def spawn(self, role: str, rank: int, marker: str) -> Any:
        """Ask Ray for the actor of a rank; its class is not constructed yet."""
        slot = self.placement[rank] if self.placement is not None else None
        path = str((self.log_dir / f"{role}-{rank}.log").absolute()) if self.log_dir is not None else None
        return _spawn(self.plain, HostSettings(role, rank, path, marker), slot, dict(self.env))


class ActorGroup:
    """The actors of one role. Made by `create`.

    A lost actor ends the run, unless `on_lost` is set: then that is told the rank and the failure, and takes care.
    """

    def __init__(self, role: str, session: Session, ranks: int, recipe: _Recipe) -> None:
        self.role = role
        self.handles: list[Any] = [None] * ranks
        self.members: list[Member] = []
        self.on_lost: Callable[[int, ActorFailed], None] | None = None
        self._addresses: dict[int, str] = {}
        self._session = session
        self._recipe = recipe

    def __len__(self) -> int:
        return len(self.handles)

    @classmethod
    async def create(
        cls,
        role: str,
        plain: type,
        ranks: int,
        *,
        session: Session,
        args_for_rank: Callable[[int], Arguments],
        deadline_s: float,
        placement: Sequence[Slot] | None = None,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
    ) -> ActorGroup:
        """Start `ranks` actors of the plain class, rank r constructed with `args_for_rank(r)`, one a slot.

        Without `placement` they take no devices. `env` is set before the process imports anything. Each of the two
        stages (processes up, constructors done) has `deadline_s`. Raises `DeadlineExceeded` or `ActorFailed`.
        """
        if placement is not None and len(placement) != ranks:
            raise ValueError(f"{role}: {ranks} ranks, but {len(placement)} slots are reserved for it")
        recipe = _Recipe(plain, args_for_rank, deadline_s, placement, dict(env or {}), log_dir)
        group = cls(role, session, ranks, recipe)
        session.adopt(group)
        try:
            await group._start(range(ranks))
        except BaseException:
            group.kill()
            raise
        return group

    async def _start(self, ranks: Sequence[int]) -> None:
        """Start the actors of these ranks: processes, supervision, constructors."""
        recipe, names = self._recipe, [f"start of {self.role} rank {rank}" for rank in ranks]
        for rank in ranks:
            self.handles[rank] = recipe.spawn(self.role, rank, self._session.marker)
        hellos = [_control(self.handles[rank], "rlhf_hello").remote() for rank in ranks]
        identities = await wait_all(hellos, what=names, deadline_s=recipe.deadline_s)
        await self._enrol(ranks, identities)
        starts = [self.handles[rank].rlhf_start.remote(*recipe.args_for_rank(rank)) for rank in ranks]
        constructed = wait_all(starts, what=names, deadline_s=recipe.deadline_s)
        await self._session.supervisor.guard(constructed)

    async def _enrol(self, ranks: Sequence[int], identities: Sequence[Mapping[str, Any]]) -> None:
        """Make supervision know the actors."""
        enrolled = []
        for rank, identity in zip(ranks, identities, strict=True):
            handle = self.handles[rank]
            member = Member(
                role=self.role,
                rank=rank,
                actor_id=handle._actor_id.hex(),
                pid=identity["pid"],
                node=identity["node"],
                hostname=identity["hostname"],
                log=identity["log"],
                agents=self._session.agents,
                hold=_control(handle, "rlhf_hold").remote(),
            )
            await asyncio.to_thread(member.agents.ask, member.node, "watch", member.pid)
            enrolled.append(member)
            self._addresses[rank] = identity["ip"]
            register(member)
        self.members += enrolled
        self._session.responsible_for(enrolled)
        self._session.supervisor.watch(enrolled, self._lost)

    def _lost(self, member: Member, failure: ActorFailed) -> bool:
        """Tell who takes care of a lost actor; False where nobody does."""
        if self.on_lost is None:
            return False
        self.on_lost(member.rank, failure)
        return True

    async def replace(self, rank: int) -> None:
        """End the actor of a rank, where it still lives, and start another in its place, constructed like the first.

        Raises what `create` raises; then the rank has no actor.
        """
        await self.end(rank)
        try:
            await self._start([rank])
        except BaseException:
            await self.end(rank)
            raise

    async def end(self, rank: int) -> None:
        """End the actor of a rank and whatever it started, on its node; that is no failure."""
        ended = [member for member in self.members if member.rank == rank]
        self._kill([rank])
        self.members = [member for member in self.members if member.rank != rank]
        for member in ended:
            await asyncio.to_thread(self._session.agents.ask, member.node, "end", _END_GRACE_S, deadline_s=_END_S)
        forget(ended)

    def ref(self, rank: int, method: str, *args: Any, num_returns: int = 1, **kwargs: Any) -> Any:
        """Call one rank and return the reference to its result, or `num_returns` references."""
        return getattr(self.handles[rank], method).options(num_returns=num_returns).remote(*args, **kwargs)

    def refs(self, method: str, *args: Any, num_returns: int = 1, **kwargs: Any) -> list[Any]:
        """Call all ranks alike; one `ref` a rank."""
        return [self.ref(rank, method, *args, num_returns=num_returns, **kwargs) for rank in range(len(self))]

    async def call_beside(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        """`call`, but of a method that may run while another one does: it waits for no work of the actor's."""
        references = [_control(handle, method).remote(*args) for handle in self.handles]
        return await self._all(references, what, deadline_s, 1)

    async def call(
        self, method: str, *args: Any, what: str, deadline_s: float, num_returns: int = 1, **kwargs: Any
    ) -> list[Any]:
        """Call all ranks alike and await them; the results by rank. The first failure is raised at once.

        With `num_returns` above 1 the first value (the header) is awaited and the others (columns) stay references:
        each result is a tuple `(value, reference, ...)`.
        """
        references = self.refs(method, *args, num_returns=num_returns, **kwargs)
        return await self._all(references, what, deadline_s, num_returns)

    async def call_rank(
        self, rank: int, method: str, *args: Any, what: str, deadline_s: float, num_returns: int = 1, **kwargs: Any
    ) -> Any:
        """Call one rank and await it; its result as in `call`."""
        reference = self.ref(rank, method, *args, num_returns=num_returns, **kwargs)
        first, *others = reference if num_returns > 1 else (reference,)
        value = await wait(first, what=f"{what} ({self.role} rank {rank})", deadline_s=deadline_s)
        return (value, *others) if others else value

    async def _all(self, references: Sequence[Any], what: str, deadline_s: float, num_returns: int) -> list[Any]:
        names = [f"{what} ({self.role} rank {rank})" for rank in range(len(self))]
        if num_returns == 1:
            return await wait_all(references, what=names, deadline_s=deadline_s)
        values: list[Any] = await wait_all([first for first, *_ in references], what=names, deadline_s=deadline_s)
        return [(value, *others) for value, (_, *others) in zip(values, references, strict=True)]

    async def ping(self, deadline_s: float = 10.0) -> list[dict[str, Any]]:
        """Pid, node, hostname, ip and log of every actor's process; answered while its methods compute."""
        hellos = [_control(handle, "rlhf_hello").remote() for handle in self.handles]
        return await wait_all(hellos, what=f"ping of {self.role}", deadline_s=deadline_s)

    async def meeting_address(self, rank: int = 0, deadline_s: float = 10.0) -> tuple[str, int]:
        """An IP address of that actor's node and a port that its process holds, for a rendezvous that it serves."""
        reference = _control(self.handles[rank], "rlhf_hold_port").remote()
        port: int = await wait(reference, what=f"a port ({self.role} rank {rank})", deadline_s=deadline_s)
        return self._addresses[rank], port

    def kill(self) -> None:
        """End the actors without waiting; that is no failure. What they started is ended by the session's `close`."""
        self._kill(range(len(self.handles)))
        self.handles.clear()

    def _kill(self, ranks: Sequence[int]) -> None:
        import ray

        for member in self.members:
            if member.rank in ranks and not member.closing:
                member.closing = True
                try:
                    member.agents.ask(member.node, "mark", [member.pid])
                except Exception as error:  # its node may be gone; the others must be ended all the same
                    log.warning("%s: what it started could not be looked up: %s", member, error)
        for rank in ranks:
            handle, self.handles[rank] = self.handles[rank], None
            if handle is not None:
                ray.kill(handle)

    async def close(self) -> None:
        """End the actors and whatever they started, on their nodes; returns when it is gone."""
        self.kill()
        for node in sorted({member.node for member in self.members}):
            await asyncio.to_thread(self._session.agents.ask, node, "end", _END_GRACE_S, deadline_s=_END_S)
        forget(self.members)


def _spawn(plain: type, settings: HostSettings, slot: Slot | None, env: dict[str, str]) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    is_async = _has_coroutines(plain)
    # The name is what `ps` and Ray's own logs show.
    hosted = type(f"{settings.role}-{settings.rank}", (_AsyncHost if is_async else _Host, plain), {})
    options: dict[str, Any] = {
        "num_cpus": slot.cpus if slot is not None else 0,
        "num_gpus": slot.gpus if slot is not None else 0,
        "max_concurrency": _ASYNC_CONCURRENCY if is_async else 1,
        "max_restarts": 0,
    }
    if slot is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.bundle
        )
    if env:
        options["runtime_env"] = {"env_vars": env}
    factory = ray.remote(concurrency_groups={_CONTROL: _CONTROL_THREADS})(hosted)
    return factory.options(**options).remote(settings)


def _control(handle: Any, method: str) -> Any:
    return getattr(handle, method).options(concurrency_group=_CONTROL)
