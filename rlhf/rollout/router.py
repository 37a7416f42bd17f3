"""Which engine gets the next request: a pure state machine.

Invariants (each has a test)
- A request goes to the engine with the fewest outstanding tokens among those with a free slot; ties go to the
  lowest index.
- No engine holds more than `slots` requests.
- What was acquired is released exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Load:
    requests: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.requests.values())


class Router:
    """Least-loaded routing over a fixed number of engines, in tokens."""

    def __init__(self, engines: int, slots: int) -> None:
        self._slots = slots
        self._loads = [_Load() for _ in range(engines)]

    def acquire(self, request_id: str, tokens: int) -> int | None:
        """Book a request that may take `tokens` tokens; returns the engine, or None when all slots are taken."""
        free = [i for i, load in enumerate(self._loads) if len(load.requests) < self._slots]
        if not free:
            return None
        engine = min(free, key=lambda i: (self._loads[i].tokens, i))
        if any(request_id in load.requests for load in self._loads):
            raise ValueError(f"request {request_id} is already with an engine")
        self._loads[engine].requests[request_id] = tokens
        return engine

    def release(self, request_id: str, engine: int) -> None:
        """The request is done with, whatever its outcome."""
        del self._loads[engine].requests[request_id]

    @property
    def outstanding(self) -> int:
        """Requests that are with an engine."""
        return sum(len(load.requests) for load in self._loads)
