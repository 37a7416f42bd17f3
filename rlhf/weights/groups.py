"""Transfer groups: which engines receive together, and since when.

Invariants (each has a test)
- Every member is in exactly one group, and a group has at most `group_size` engines.
- An epoch stands for one membership: it is never used again, and a later group has a higher one.
- Admitting engines leaves every existing group as it is; removing some dissolves their groups only, and what remains of
  those is grouped anew.

A pure state: who is with whom is decided here, and `rlhf.weights.sync` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Engines (by index) that share one membership `epoch`."""

    epoch: int
    engines: tuple[int, ...]


class Membership:
    """The groups of a run at this moment."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._groups: list[TransferGroup] = []
        self._next_epoch = 0

    @property
    def groups(self) -> tuple[TransferGroup, ...]:
        """All groups, the oldest first."""
        return tuple(self._groups)

    @property
    def engines(self) -> frozenset[int]:
        """All members."""
        return frozenset(engine for group in self._groups for engine in group.engines)

    def admit(self, engines: Iterable[int]) -> list[TransferGroup]:
        """Put engines that are no members into new groups; returns these."""
        new = sorted(set(engines))
        known = self.engines.intersection(new)
        if known:
            raise ValueError(f"engines {sorted(known)} are members already")
        return self._form(new)

    def remove(self, engines: Iterable[int]) -> list[TransferGroup]:
        """Take engines out; returns the groups that are dissolved by it. Who is no member is ignored."""
        gone = set(engines)
        dissolved = [group for group in self._groups if gone.intersection(group.engines)]
        self._dissolve(dissolved, gone)
        return dissolved

    def renew(self, groups: Iterable[TransferGroup]) -> None:
        """Give the engines of these groups, those still there, a new epoch: their connections are not to be trusted."""
        self._dissolve([group for group in groups if group in self._groups], set())

    def of(self, engines: Iterable[int] | None) -> list[TransferGroup]:
        """The groups of these engines, all by default; raises `ValueError` for a stranger or a part of a group."""
        if engines is None:
            return list(self._groups)
        wanted = set(engines)
        strangers = wanted - self.engines
        if strangers:
            raise ValueError(f"engines {sorted(strangers)} are not members of any transfer group")
        found = [group for group in self._groups if wanted.intersection(group.engines)]
        for group in found:
            if not wanted.issuperset(group.engines):
                raise ValueError(f"engines {list(group.engines)} receive together; {sorted(wanted)} has only some")
        return found

    def _dissolve(self, groups: Sequence[TransferGroup], gone: set[int]) -> None:
        self._groups = [group for group in self._groups if group not in groups]
        self._form([engine for group in groups for engine in group.engines if engine not in gone])

    def _form(self, engines: Sequence[int]) -> list[TransferGroup]:
        starts = range(0, len(engines), self._group_size)
        formed = [
            TransferGroup(self._next_epoch + place, tuple(engines[start : start + self._group_size]))
            for place, start in enumerate(starts)
        ]
        self._next_epoch += len(formed)
        self._groups += formed
        return formed
