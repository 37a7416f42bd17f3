"""The order in which prompts are drawn.

Invariants
- Draws form one endless stream over epochs: each epoch has every prompt once, and a batch may cross the border.
  Nothing is cut off, however batch size and number of prompts relate.
- The order of an epoch is a function of (seed, epoch) alone. Draw index i is place i mod N of epoch i div N, so one
  number is the whole state, and it does not depend on the number of ranks or engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.errors import DataError
from rlhf.trajectories import Prompt, PromptDraw


class PromptSampler:
    """Draws prompts, shuffled anew for each epoch or in the order of the source."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("there are no prompts to draw from")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._next = 0
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, count: int) -> list[PromptDraw]:
        """The next `count` prompts of the stream; `draw_index` counts all draws of the run from 0."""
        return [self._draw_one() for _ in range(count)]

    def at(self, draw_index: int) -> PromptDraw:
        """The draw of that index, without moving the stream."""
        epoch, place = divmod(draw_index, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return PromptDraw(self._prompts[self._order[place]], draw_index, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what it is a stream of."""
        return {"next": self._next, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; raises `DataError` where prompts, seed or shuffling are others."""
        changed = [
            f"{name} was {state.get(name)}, is {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if changed:
            raise DataError(f"the data position belongs to another stream of prompts: {'; '.join(changed)}")
        self._next = int(state["next"])

    def _identity(self) -> dict[str, Any]:
        ids = hashlib.blake2b("\n".join(p.prompt_id for p in self._prompts).encode(), digest_size=8).hexdigest()
        return {"seed": self._seed, "shuffle": self._shuffle, "prompts": len(self._prompts), "prompt_ids": ids}

    def _draw_one(self) -> PromptDraw:
        draw = self.at(self._next)
        self._next += 1
        return draw

    def _order_of(self, epoch: int) -> list[int]:
        """Sorted by a hash of (seed, epoch, index): the same with every version of every library."""
        indices = list(range(len(self._prompts)))
        if self._shuffle:
            indices.sort(key=lambda index: hashlib.blake2b(f"{self._seed}/{epoch}/{index}".encode()).digest())
        return indices
