"""From spans to `time/<phase>` and `busy/<role>`: pure functions on intervals (invariant 12).

- A step is the driver's span named `STEP`. Its phases are the driver's spans whose parent is that span. They partition
  the driver's wall clock: an instant that several phases cover counts for the one that started first (the others are
  hidden behind it), so phases and `time/other` always add up to `time/step`.
- `busy/<role>` is the union of that role's spans inside the step, averaged over the role's processes. So it compares
  with `time/step`: a role that works all the time has `busy/<role>` equal to it, however many ranks it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rlhf.tracking.spans import Span

STEP = "step"
DRIVER = "driver"
_RESERVED = ("step", "other")


def summarise(spans: Sequence[Span], step: int, ranks: Mapping[str, int] | None = None) -> dict[str, float]:
    """`time/step`, `time/<phase>`, `time/other` and `busy/<role>` of one step, seconds.

    `spans` are all that were drained with the step's own span, those of the other processes included. `ranks` gives the
    number of processes of a role; without it, those that recorded a span in this step. An idle process counts only if
    `ranks` says that it is there. Raises `ValueError` unless there is exactly one span of this step.
    """
    steps = [span for span in spans if span.role == DRIVER and span.name == STEP and span.step == step]
    if len(steps) != 1:
        raise ValueError(f"step {step}: {len(steps)} driver spans named {STEP!r}, expected exactly one")
    whole = steps[0]
    phases = [span for span in spans if span.role == DRIVER and span.parent == whole.span_id]
    metrics = {"time/step": whole.seconds}
    metrics |= {f"time/{name}": seconds for name, seconds in _partition(phases, whole).items()}
    metrics["time/other"] = whole.seconds - sum(metrics[key] for key in metrics if key != "time/step")
    metrics |= {f"busy/{role}": seconds for role, seconds in _busy(spans, whole, ranks or {}).items()}
    return metrics


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end): overlaps count once."""
    total, covered_to = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def _partition(phases: Iterable[Span], whole: Span) -> dict[str, float]:
    """Seconds of each phase's name inside `whole`, each instant given to the phase that started first."""
    seconds: dict[str, float] = defaultdict(float)
    covered_to = whole.start
    for phase in sorted(phases, key=lambda span: span.start):
        if phase.name in _RESERVED:
            raise ValueError(f"a phase can't be named {phase.name!r}: time/{phase.name} means something else")
        end = min(phase.end, whole.end)
        seconds[phase.name] += max(0.0, end - max(phase.start, covered_to))
        covered_to = max(covered_to, end)
    return dict(seconds)


def _busy(spans: Iterable[Span], whole: Span, ranks: Mapping[str, int]) -> dict[str, float]:
    """Mean over a role's processes of the union of their spans, clipped to `whole`."""
    intervals: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        start, end = max(span.start, whole.start), min(span.end, whole.end)
        if span.role != DRIVER and start < end:
            intervals[span.role][span.process].append((start, end))
    return {
        role: sum(union_seconds(process) for process in by_process.values()) / max(ranks.get(role, 0), len(by_process))
        for role, by_process in intervals.items()
    }
