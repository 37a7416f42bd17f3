"""The session with Ray: start or join a cluster, and leave nothing behind.

Invariants (each has a test)
- What can't be placed is refused before anything is started (or, on a joined cluster, before any actor).
- With `RAY_ADDRESS` (as under `ray job submit`) or an explicit address we join; else we start a cluster of our own,
  with as many CPU slots as the run needs.
- `close` leaves no process and no temporary file of ours, in every case: after success, an exception, Ctrl-C; and a
  reaper sees to it when the driver itself is killed.
- Sessions on one machine share no folder and no port.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from rlhf.cluster import supervision
from rlhf.cluster.agent import Agents
from rlhf.cluster.model_shape import ModelShapes
from rlhf.cluster.needs import Needs, needs
from rlhf.cluster.placement import Placement
from rlhf.cluster.preflight import Node, Refused, Resources, local_resources, preflight, resolve_device
from rlhf.cluster.reaper import Reaper
from rlhf.cluster.supervision import Member, Supervisor
from rlhf.config.schema import Config

if TYPE_CHECKING:
    from rlhf.cluster.actors import ActorGroup

log = logging.getLogger(__name__)

# Trajectories are token ids and a few floats a token: a gigabyte holds a hundred million tokens.
_OBJECT_STORE_BYTES = 1 << 30
_GRACE_S = 5.0


class Session:
    """An open session: `needs`, `placement`, `supervisor`. Made by `open_session`; close it, or use it as a context."""

    def __init__(
        self,
        needs: Needs,
        resources: Resources,
        reaper: Reaper,
        *,
        address: str | None = None,
        started: Sequence[int] = (),
    ) -> None:
        import ray

        self.needs = needs
        self.resources = resources
        self.address = address
        self.owned = address is None
        self.placement = Placement()
        self.supervisor = Supervisor()
        self.agents = Agents(ray.get_runtime_context().get_node_id())
        self._groups: list[ActorGroup] = []
        self._started = list(started)
        self._closed = False
        self._reaper = reaper
        self.marker = reaper.marker
        self._reaper.add(list(started))
        supervision.install()
        atexit.register(self.close)

    def adopt(self, group: ActorGroup) -> None:
        """Take over the duty to end a group."""
        self._groups.append(group)

    async def end_actors(self) -> None:
        """End all actors and give back their places, so that the run can start its roles again."""
        self.supervisor.stop()
        for group in self._groups:
            await group.close()
        self._groups.clear()
        self.placement.remove()
        self.supervisor = Supervisor()

    def responsible_for(self, members: Iterable[Member]) -> None:
        """Have these actors' processes ended also if the driver is killed."""
        self._reaper.add([member.pid for member in members if member.node == self.agents.nodes()[0]])

    def close(self) -> None:
        """End every actor and process of ours, give back placement groups, and leave the cluster; may be repeated.

        Synchronous and deaf to Ctrl-C and SIGTERM, so that nothing can interrupt it; at most about 30 s, usually two.
        """
        import ray

        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.supervisor.stop()
        steps: list[Callable[[], object]] = [group.kill for group in self._groups]
        steps += [self.placement.remove, self._end_remote, self._mark_started, ray.shutdown]
        steps += [self._end_local, self._reaper.dismiss]
        with _without_interrupts():
            for step in steps:
                try:
                    step()
                except Exception:  # the later steps matter more, and the run's own error must not be hidden
                    log.warning("while closing the session", exc_info=True)
        for group in self._groups:
            supervision.forget(group.members)

    def _mark_started(self) -> None:
        # Before Ray shuts down: its agents and workers are still children of the raylet then.
        self.agents.ask(self.agents.nodes()[0], "mark", self._started)

    def _end_remote(self) -> None:
        for node in self.agents.nodes()[1:]:
            self.agents.ask(node, "end", _GRACE_S, deadline_s=4 * _GRACE_S)

    def _end_local(self) -> None:
        told = self.agents.ask(self.agents.nodes()[0], "end", _GRACE_S)
        if told:
            log.info("ended processes that had not gone by themselves: %s", told)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_session(
    config: Config, shapes: ModelShapes, *, address: str | None = None, say: Callable[[str], None] = log.info
) -> Session:
    """Join the cluster at `address` or `RAY_ADDRESS`, or start one; compare needs with it first.

    `say` is told in one line what was done. Raises `Refused` with the arithmetic; nothing is left running then.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS") or None
    if ray.is_initialized():
        raise Refused("this process is connected to Ray already; call ray.shutdown() first, or give the address")
    session = _join(config, shapes, address) if address else _start(config, shapes)
    with_what = f"needs {session.needs.devices} {'CPU slots' if session.needs.device == 'cpu' else 'GPUs'}"
    deed = "started a Ray cluster on this machine" if session.owned else f"joined the Ray cluster at {session.address}"
    say(f"{deed}: {session.resources}; the run {with_what}")
    return session


def _start(config: Config, shapes: ModelShapes) -> Session:
    import ray

    resources = local_resources()
    needed = needs(
        config, shapes.policy, resolve_device(config.placement.device, resources), shapes.critic, shapes.reward
    )
    preflight(needed, resources, config.rollout.gpu_memory_utilization)
    units = sum(pool.units for pool in needed.pools)
    slots = max(needed.devices if needed.device == "cpu" else units, resources.cpus)
    # A cluster of our own reports to nobody, unless the user has said otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    reaper = Reaper()
    before = _children()
    try:
        _init(
            "local",
            num_cpus=slots,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(reaper.scratch),
        )
        have = Resources((Node(slots, resources.gpus, resources.host_bytes),), resources.gpu_bytes)
        return Session(needed, have, reaper, started=sorted(_children() - before))
    except BaseException:
        ray.shutdown()
        reaper.dismiss()
        raise


def _join(config: Config, shapes: ModelShapes, address: str) -> Session:
    import ray

    if address.startswith("ray://"):
        raise Refused(
            f"{address}: Ray Client can't be used, the driver must run on a node of the cluster. "
            "Start it there, or submit it with: ray job submit -- python -m rlhf.train ..."
        )
    try:
        _init(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(f"can't join the Ray cluster at {address}: {error}") from error
    try:
        resources = _cluster_resources()
        needed = needs(
            config, shapes.policy, resolve_device(config.placement.device, resources), shapes.critic, shapes.reward
        )
        preflight(needed, resources, config.rollout.gpu_memory_utilization)
        return Session(needed, resources, Reaper(), address=address)
    except BaseException:
        ray.shutdown()
        raise


def _init(address: str, **settings: Any) -> None:
    import ray

    # Ray warns at every start about this default that changes in the future; no actor of ours depends on it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **settings)


def _cluster_resources() -> Resources:
    """What a joined cluster has. Ray's memory is what its nodes had free when they started."""
    import ray

    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            memory = int(has.get("memory", 0) + has.get("object_store_memory", 0))
            nodes.append(Node(int(has.get("CPU", 0)), int(has.get("GPU", 0)), memory))
    gpu_bytes = local_resources().gpu_bytes if any(node.gpus for node in nodes) else None
    return Resources(tuple(nodes), gpu_bytes)


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SIGTERM too: Ray's handler and ours raise what no `except Exception` below would stop.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
