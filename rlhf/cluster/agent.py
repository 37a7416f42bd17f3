"""What the driver must do on another node to know and to end the processes there.

The driver's own node needs no agent actor: the same class is called directly. On every other node one small actor
without devices holds it, pinned to the node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.cluster import wait
from rlhf.cluster.process import ExitWatch, end, tail, trees

_ANSWER_S = 10.0


class NodeAgent:
    """Watches and ends processes of this node."""

    def __init__(self) -> None:
        self._watches: dict[int, ExitWatch] = {}
        self._doomed: dict[int, Any] = {}

    def watch(self, pid: int) -> None:
        """Remember a process while it lives, so that `status` can tell how it ended."""
        self._watches[pid] = ExitWatch(pid)

    def status(self, pid: int, wait_s: float) -> int | None:
        """Wait status of a watched process, None if unknown after `wait_s`."""
        watch = self._watches.get(pid)
        return watch.status(wait_s) if watch else None

    def tail(self, log: str, lines: int) -> list[str]:
        """The last lines of a log of this node."""
        return tail(Path(log), lines)

    def mark(self, pids: list[int]) -> None:
        """Remember these processes and their descendants, for `end`: afterwards they may have lost their parents."""
        self._doomed.update({process.pid: process for process in trees(pids)})

    def end(self, grace_s: float) -> list[int]:
        """End what was marked and still lives; returns the pids that didn't go by themselves."""
        marked, self._doomed = self._doomed, {}
        doomed = list(marked.values())
        told = end(doomed, grace_s)
        for process in doomed:
            watch = self._watches.pop(process.pid, None)
            if watch is not None:
                watch.close()
        return told


class Agents:
    """The agents of all nodes, started when first needed."""

    def __init__(self, own_node: str) -> None:
        self._own_node = own_node
        self._local = NodeAgent()
        self._remote: dict[str, Any] = {}

    def ask(self, node: str, method: str, *args: Any, deadline_s: float = _ANSWER_S) -> Any:
        """Call a method of a node's agent and return its answer; synchronous, for at most `deadline_s` seconds."""
        if node == self._own_node:
            return getattr(self._local, method)(*args)
        handle = self._remote.get(node) or self._start(node)
        reference = getattr(handle, method).remote(*args)
        return wait.get(reference, what=f"{method} on node {node[:12]}", deadline_s=deadline_s)

    def nodes(self) -> list[str]:
        """Nodes that have an agent, the driver's own first."""
        return [self._own_node, *self._remote]

    def _start(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        handle = ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=pinned).remote()
        self._remote[node] = handle
        return handle
