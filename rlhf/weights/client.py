"""Our client of vLLM's four-method weight-sync protocol, over Ray actors.

What vLLM's own Ray client lacks: each engine gets a rank offset of its own, every call has a deadline, and a failure
says which engines it is about.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.weights.receipts import SyncError


class CallsFailed(SyncError):
    """A call failed on some engines, or was not done by its deadline: reasons by the engine's place in the group."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"engine number {place} of the group: {why}" for place, why in failures.items()))
        self.failures = dict(failures)


class Calls:
    """The same call on every engine of a group, under way."""

    def __init__(self, method: str, references: Sequence[Any], deadline_s: float) -> None:
        self._method = method
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self.futures = [reference.future() for reference in references]

    def failures(self) -> dict[int, str]:
        """Those that have failed by now, without waiting."""
        return {
            place: f"{self._method}: {future.exception()}"
            for place, future in enumerate(self.futures)
            if future.done() and future.exception() is not None
        }

    def extend(self, deadline_s: float) -> None:
        """Count the deadline from now."""
        self._end = time.monotonic() + deadline_s

    def finish(self) -> None:
        """Wait for all of them until the deadline; raises `CallsFailed`."""
        left = max(0.0, self._end - time.monotonic())
        concurrent.futures.wait(self.futures, timeout=left)
        failures = self.failures()
        for place, future in enumerate(self.futures):
            if not future.done():
                failures[place] = f"{self._method}: not done after {self._deadline_s:g} s"
        if failures:
            raise CallsFailed(failures)


class EngineClient:
    """Drives the engines of one transfer group together.

    `handles` are rollout engine actors and `workers[i]` the number of ranks of engine i. Rank 0 of the transfer group
    is the sender, so engine i begins at 1 + the workers of the engines before it.
    """

    def __init__(self, handles: Sequence[Any], workers: Sequence[int], deadline_s: float) -> None:
        self._handles = list(handles)
        self._offsets = [1 + sum(workers[:i]) for i in range(len(workers))]
        self._deadline_s = deadline_s

    def begin(self, method: str, *args: Any) -> Calls:
        """Call `method` on every engine and return at once."""
        return Calls(method, [getattr(h, method).remote(*args) for h in self._handles], self._deadline_s)

    def begin_init(self, init_info: Mapping[str, Any]) -> Calls:
        """Let the engines join the transfer group, each at its own offset; returns at once."""
        method = "init_weight_transfer_engine"
        infos = [{**init_info, "rank_offset": offset} for offset in self._offsets]
        references = [getattr(h, method).remote(i) for h, i in zip(self._handles, infos, strict=True)]
        return Calls(method, references, self._deadline_s)

    # The four methods of vLLM's protocol; they block, since vLLM's trainer side is synchronous.

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the transfer group."""
        self.begin_init(init_info).finish()

    def start_weight_update(self) -> None:
        """Open the update on every engine."""
        self.begin("start_weight_update").finish()

    def update_weights(self, update_info: Any) -> None:
        """Have every engine receive what `update_info` declares; returns when all of it is loaded."""
        self.begin("update_weights", update_info).finish()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update. The version is set at the commit, after the receipts were compared, not here."""
        self.begin("finish_weight_update").finish()
