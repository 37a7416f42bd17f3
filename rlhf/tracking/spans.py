"""Spans: the source of every timing.

A span is a named interval of one process. The driver's phases, an engine's generation and a learner's update are all
spans; `time/<phase>` and `busy/<role>` are sums over them and nothing else measures time. Each process records into
its own `SpanRecorder`; actors hand theirs to the driver with their results, and the driver writes `spans.jsonl`.
"""

from __future__ import annotations

import contextvars
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

# Wall clock at import plus a monotonic offset: spans of one process never run backwards when the clock is set.
_EPOCH = time.time() - time.perf_counter()
_HOST = socket.gethostname()
_parent: contextvars.ContextVar[str | None] = contextvars.ContextVar("rlhf_span_parent", default=None)


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process."""
    return _EPOCH + time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """One interval: `start` and `end` in seconds since the Unix epoch.

    `role` is the pool (`driver`, `policy`, `rollout`, ...), the same for all its ranks; `process` tells ranks apart.
    """

    name: str
    role: str
    step: int | None
    start: float
    end: float
    span_id: str
    parent: str | None
    process: str = ""

    @property
    def seconds(self) -> float:
        """Length of the interval, seconds."""
        return self.end - self.start

    def as_dict(self) -> dict[str, Any]:
        """The span as a line of `spans.jsonl`."""
        return asdict(self)


class SpanRecorder:
    """Collects the spans of one process until they are drained.

    It keeps the newest `limit` spans, so a process that nobody drains doesn't grow; `lost` counts the others.
    """

    def __init__(self, role: str = "driver", limit: int = 100_000) -> None:
        self.role = role
        self.lost = 0
        self._spans: deque[Span] = deque(maxlen=limit)

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
            self._add(name, step, start, span_id, enclosing)

    def record(self, name: str, start: float, step: int | None = None) -> None:
        """Record an interval that began at `start` (a value of `now()`) and ends now, where no block encloses it."""
        self._add(name, step, start, uuid.uuid4().hex[:16], _parent.get())

    def _add(self, name: str, step: int | None, start: float, span_id: str, parent: str | None) -> None:
        self.absorb([Span(name, self.role, step, start, now(), span_id, parent, f"{_HOST}:{os.getpid()}")])

    def absorb(self, spans: Iterable[Span], step: int | None = None) -> None:
        """Take over spans that another process drained; those that don't know their step get `step`."""
        for span in spans:
            self.lost += len(self._spans) == self._spans.maxlen
            self._spans.append(span if span.step is not None else replace(span, step=step))

    def seconds(self, name: str, since: float) -> float:
        """Seconds of the spans of that name which began at `since` (a value of `now()`) or later, if not drained."""
        return sum(span.seconds for span in self._spans.copy() if span.name == name and span.start >= since)

    def drain(self) -> list[Span]:
        """Hand out what was recorded so far, and forget it."""
        # Popped and not swapped: a span that another thread records meanwhile stays for the next time.
        return [self._spans.popleft() for _ in range(len(self._spans))]


# The process's own recorder. `set_role` names it; the driver leaves it at "driver".
recorder = SpanRecorder()
span = recorder.span


def set_role(role: str) -> None:
    """Name this process in the spans that it records from now on."""
    recorder.role = role
