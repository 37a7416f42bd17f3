"""Our client of vLLM's four-method weight-sync protocol, over Ray actors.

Two things that vLLM's own Ray client lacks: each engine gets a rank offset of its own, and every call has a deadline
that names the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.cluster import wait


class EngineClient:
    """Drives all engines of a sync together; the calls block, since vLLM's trainer side is synchronous.

    `handles` are rollout engine actors and `workers[i]` the number of ranks of engine i. Rank 0 of the transfer group
    is the sender, so engine i begins at 1 + the workers of the engines before it.
    """

    def __init__(self, handles: Sequence[Any], workers: Sequence[int], deadline_s: float) -> None:
        self._handles = list(handles)
        self._offsets = [1 + sum(workers[:i]) for i in range(len(workers))]
        self._deadline_s = deadline_s

    def _call(self, method: str, *args: Sequence[Any]) -> None:
        """Call `method` on every engine, with the i-th element of each of `args` for engine i."""
        calls = [getattr(h, method).remote(*(a[i] for a in args)) for i, h in enumerate(self._handles)]
        wait.get(calls, what=f"weight sync: {method} on {len(calls)} engine(s)", deadline_s=self._deadline_s)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the transfer group, each engine at its own offset."""
        self._call("init_weight_transfer_engine", [{**init_info, "rank_offset": offset} for offset in self._offsets])

    def start_weight_update(self) -> None:
        """Open the update on every engine."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have every engine receive what `update_info` declares; returns when all of it is loaded."""
        self._call("update_weights", [update_info] * len(self._handles))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update. The version is set at the commit, after the receipts were compared, not here."""
        self._call("finish_weight_update")
