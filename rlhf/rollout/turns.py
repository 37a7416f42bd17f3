"""Turns: announced requests come in one after another, in the order announced, whatever order they arrive in.

What an engine computes together decides how its sums are rounded. A run that has to repeat bit for bit therefore
announces its requests as a batch, which begins when all of it is there.

Invariants
- Requests of a batch are let in one at a time, in the order announced; the next when the one before it is in.
- A request that is skipped, or fails on its way in, holds up nobody. One that was never announced passes at once.
- A batch is opened when the one before it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class Turns:
    """The batches that were announced to one engine. A request must not come before its announcement."""

    def __init__(self) -> None:
        self._batches: dict[str, Batch] = {}
        self._one_at_a_time = asyncio.Lock()

    def announce(self, request_ids: Iterable[str]) -> Batch:
        """Have these requests wait for their turn. Raises ValueError for one that does already."""
        batch = Batch(request_ids)
        if twice := self._batches.keys() & batch.ahead.keys():
            raise ValueError(f"requests {sorted(twice)} were announced already")
        self._batches.update(dict.fromkeys(batch.ahead, batch))
        return batch

    @asynccontextmanager
    async def alone(self, batch: Batch) -> AsyncIterator[None]:
        """Wait until the batches before this one are complete; `await batch.complete()` then lets it in."""
        try:
            async with self._one_at_a_time:
                yield
        finally:
            # Whatever ended this, nobody may wait for a batch that will not be let in.
            for request_id in list(batch.ahead):
                self.skip(request_id)

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[None]:
        """Wait for the request's turn; at the end of the block it is in."""
        batch = self._batches.get(request_id)
        try:
            if batch is not None:
                await batch.turn(request_id)
            yield
        finally:
            self.skip(request_id)

    def skip(self, request_id: str) -> None:
        """The request is in, or will not come: it is the next one's turn. Unknown ones are ignored."""
        batch = self._batches.pop(request_id, None)
        if batch is not None:
            batch.skip(request_id)


class Batch:
    """Requests that have not come in yet, in their order, and who waits for a change of that."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.ahead = dict.fromkeys(request_ids)
        self._open = False
        self._changed = asyncio.Event()

    async def complete(self) -> None:
        """Let the requests in, and return when the last one is."""
        self._open = True
        self._notify()
        while self.ahead:
            await self._changed.wait()

    async def turn(self, request_id: str) -> None:
        """Return when the batch is open and all requests before this one are in; at once for one that is skipped."""
        while request_id in self.ahead and not (self._open and next(iter(self.ahead)) == request_id):
            await self._changed.wait()

    def skip(self, request_id: str) -> None:
        """Take the request out."""
        self.ahead.pop(request_id, None)
        self._notify()

    def _notify(self) -> None:
        """Wake everybody up who waits; each looks again, and waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
