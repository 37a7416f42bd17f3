"""Placement groups with a deadline: who gets which bundle.

Invariants (each has a test)
- Learners and scorers share one placement group; every engine has its own, since engines come and go.
- A rank is one bundle; an engine is one bundle, on one node, of all its devices.
- A group that isn't placed at the deadline is removed, and the error says what is pending and what the cluster has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.cluster.needs import Needs, PoolNeeds
from rlhf.cluster.wait import DeadlineExceeded

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Slot:
    """A rank's place: a bundle of a placement group, with `cpus` and `gpus` in it."""

    group: Any
    bundle: int
    cpus: float
    gpus: float


class Placement:
    """The placement groups of a run; `slots[pool]` has one slot a rank, or one an engine."""

    def __init__(self) -> None:
        self.slots: dict[str, tuple[Slot, ...]] = {}
        self._groups: list[Any] = []

    async def reserve(self, needs: Needs, deadline_s: float) -> None:
        """Reserve everything that a run needs. Raises `DeadlineExceeded` with numbers, and keeps nothing then."""
        shared = [pool for pool in needs.pools if pool.devices and pool.pool != "rollout"]
        rollout = needs.pool("rollout")
        # All are asked for before the first is awaited, so that one deadline covers them.
        bundles = [_bundle(pool, needs.device) for pool in shared for _ in range(pool.units)]
        asked = [self._ask(bundles, "PACK")]
        engines = [_bundle(rollout, needs.device)] * rollout.units if rollout else []
        asked += [self._ask([engine], "STRICT_PACK") for engine in engines]
        names = [" and ".join(pool.pool for pool in shared), *(f"rollout engine {i}" for i in range(len(engines)))]
        await self._await_placed(asked, names, deadline_s)
        start = 0
        for pool in shared:
            self.slots[pool.pool] = tuple(
                _slot(asked[0], index, bundles[index]) for index in range(start, start + pool.units)
            )
            start += pool.units
        self.slots["rollout"] = tuple(_slot(group, 0, engine) for group, engine in zip(asked[1:], engines, strict=True))

    def _ask(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> Any:
        import ray

        group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        self._groups.append(group)
        return group

    async def _await_placed(self, groups: Sequence[Any], names: Sequence[str], deadline_s: float) -> None:
        # Polled, and not `ready()`: that starts a worker process in the group and would be a task to clean up.
        deadline = time.monotonic() + deadline_s
        pending = list(range(len(groups)))
        while pending:
            pending = [index for index in pending if not _placed(groups[index])]
            if pending and time.monotonic() > deadline:
                message = _pending_message([(names[index], groups[index]) for index in pending], deadline_s)
                self.remove()
                raise DeadlineExceeded(message)
            if pending:
                await asyncio.sleep(_POLL_S)

    def remove(self) -> None:
        """Give all of it back; Ray ends what still runs in it."""
        import ray

        for group in self._groups:
            ray.util.remove_placement_group(group)
        self._groups.clear()
        self.slots.clear()


def _bundle(pool: PoolNeeds, device: str) -> dict[str, float]:
    count = float(pool.devices_per_unit)
    return {"CPU": count} if device == "cpu" else {"GPU": count, "CPU": 1.0}


def _slot(group: Any, index: int, bundle: Mapping[str, float]) -> Slot:
    return Slot(group, index, bundle["CPU"], bundle.get("GPU", 0.0))


def _placed(group: Any) -> bool:
    import ray

    return bool(ray.util.placement_group_table(group)["state"] == "CREATED")


def _pending_message(pending: Sequence[tuple[str, Any]], deadline_s: float) -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    lines = []
    for name, group in pending:
        lines.append(f"  - {name} needs {' + '.join(_words(bundle) for bundle in group.bundle_specs)}")
    kinds = sorted({kind for _, group in pending for bundle in group.bundle_specs for kind in bundle})
    has = ", ".join(f"{total.get(kind, 0):g} {kind} of which {free.get(kind, 0):g} are free" for kind in kinds)
    return (
        f"placement groups: not placed after {deadline_s:g} s (placement.deadline_s):\n" + "\n".join(lines) + f"\n"
        f"    The cluster has {has}. Wait for other work on it to end, or lower the number of ranks and engines"
    )


def _words(bundle: Mapping[str, float]) -> str:
    return " with ".join(f"{amount:g} {kind}" for kind, amount in sorted(bundle.items(), reverse=True))
