"""Spans: the source of every timing.

A span is a named interval of one process. The driver's phases, an engine's generation and a learner's update are all
spans; `time/<phase>` and `busy/<role>` are sums over them and nothing else measures time. Each process records into
its own `SpanRecorder`; actors hand theirs to the driver with their results, and the driver writes `spans.jsonl`.
"""

from __future__ import annotations

import contextvars
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

# Wall clock at import plus a monotonic offset: spans of one process never run backwards when the clock is set.
_EPOCH = time.time() - time.perf_counter()
_parent: contextvars.ContextVar[str | None] = contextvars.ContextVar("rlhf_span_parent", default=None)


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process."""
    return _EPOCH + time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """One interval: `start` and `end` in seconds since the Unix epoch."""

    name: str
    role: str
    step: int | None
    start: float
    end: float
    span_id: str
    parent: str | None

    @property
    def seconds(self) -> float:
        """Length of the interval, seconds."""
        return self.end - self.start

    def as_dict(self) -> dict[str, Any]:
        """The span as a line of `spans.jsonl`."""
        return asdict(self)


class SpanRecorder:
    """Collects the spans of one process until they are drained."""

    def __init__(self, role: str = "driver") -> None:
        self.role = role
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, step: int | None = None, parent: str | None = None) -> Iterator[str]:
        """Record the block as a span and yield its id.

        Without `parent`, the enclosing span of the same task is the parent. The span is recorded also when the block
        raises, so a failed step's time is not lost.
        """
        span_id = uuid.uuid4().hex[:16]
        enclosing = parent if parent is not None else _parent.get()
        token = _parent.set(span_id)
        start = now()
        try:
            yield span_id
        finally:
            _parent.reset(token)
            self._spans.append(Span(name, self.role, step, start, now(), span_id, enclosing))

    def absorb(self, spans: list[Span]) -> None:
        """Take over spans that another process drained."""
        self._spans.extend(spans)

    def drain(self) -> list[Span]:
        """Hand out what was recorded so far, and forget it."""
        spans, self._spans = self._spans, []
        return spans


# The process's own recorder. `set_role` names it; the driver leaves it at "driver".
recorder = SpanRecorder()
span = recorder.span


def set_role(role: str) -> None:
    """Name this process in the spans that it records from now on."""
    recorder.role = role
