"""What engines were busy with over time: sequences alive, the tail, idle shares. Pure, with an injected clock.

The router's bookkeeping is by tokens expected; this is what happened, from the moment a request was sent to that of its
answer, as the driver saw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlhf.tracking.spans import now

# The tail begins where this share of the answers has come.
_TAIL_FROM = 0.9
_POINTS = 10


class Activity:
    """Begins and ends of requests by engine, kept until they are asked about."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._running: dict[int, int] = {}
        self._events: list[tuple[float, int, int]] = []

    def begin(self, engine: int) -> None:
        """A request was sent to the engine."""
        self._note(engine, 1)

    def end(self, engine: int) -> None:
        """It was answered, failed or given up."""
        self._note(engine, -1)

    def _note(self, engine: int, change: int) -> None:
        self._running[engine] = self._running.get(engine, 0) + change
        self._events.append((self._clock(), engine, change))

    def mark(self) -> None:
        """Forget what was; what runs goes on."""
        start = self._clock()
        self._events = [(start, engine, running) for engine, running in self._running.items() if running]

    def metrics(self, engines: Sequence[int]) -> dict[str, float]:
        """`rollout/...` of the time from the last mark to the last event.

        `live_<n>`: sequences alive after n % of the time; `tail_seconds`: from 90 % of the answers to the last;
        `idle_share_<engine>`: share of the time in which that engine had no sequence. Empty when nothing ran.
        """
        if len(self._events) < 2:
            return {}
        start, end = self._events[0][0], self._events[-1][0]
        length = end - start
        ends = [time for time, _, change in self._events if change < 0]
        metrics: dict[str, float] = {}
        if ends:
            metrics["rollout/tail_seconds"] = ends[-1] - ends[math.ceil(_TAIL_FROM * len(ends)) - 1]
        if length > 0:
            metrics |= self._live(start, length)
            metrics |= {f"rollout/idle_share_{engine}": self._idle(engine, start, end) for engine in engines}
        return metrics

    def _live(self, start: float, length: float) -> dict[str, float]:
        """Sequences alive at evenly spaced times; at a time with events, after them."""
        points: dict[str, float] = {}
        live = place = 0
        for tenth in range(1, _POINTS):
            until = start + length * tenth / _POINTS
            while place < len(self._events) and self._events[place][0] <= until:
                live += self._events[place][2]
                place += 1
            points[f"rollout/live_{100 * tenth // _POINTS}"] = float(live)
        return points

    def _idle(self, engine: int, start: float, end: float) -> float:
        idle, running, since = 0.0, 0, start
        for time, of, change in self._events:
            if of != engine:
                continue
            if running == 0:
                idle += time - since
            running += change
            since = time
        if running == 0:
            idle += end - since
        return idle / (end - start)
