"""What a learner's update says of its own speed and memory.

Invariants
- Only useful work counts as done: padding, prompts computed again and recomputation make an update slower.
- Times are those of the slowest rank, peaks those of the largest, and rates those of all ranks together.
- Times come from spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.batching import Plan
from rlhf.batching.work import TokenCounts, count_tokens, samples_of
from rlhf.learners.memory import PhasePeaks
from rlhf.learners.ranks import Ranks
from rlhf.learners.zero import ZeroEngine
from rlhf.tracking.spans import recorder, span

FORWARD_BACKWARD, OPTIMIZER, SCORE = "forward_backward", "optimizer", "score"
PHASES = (SCORE, FORWARD_BACKWARD, OPTIMIZER)


class Gauge:
    """Measures the phases of an update; `peaks` measures the memory of others."""

    def __init__(self, role: str, zero: ZeroEngine, ranks: Ranks) -> None:
        self._role = role
        self._zero = zero
        self._ranks = ranks
        self.peaks = PhasePeaks(ranks.device)

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """The block is a phase of the update, and its span."""
        with span(f"{self._role}/{name}", step), self.peaks.phase(name):
            yield

    def read(self, plan: Plan, epochs: int, since: float) -> dict[str, float]:
        """The metrics of an update that began at `since` (a value of `now()`), equal on all ranks; collective."""
        passes = recorder.seconds(f"{self._role}/{FORWARD_BACKWARD}", since)
        whole = passes + recorder.seconds(f"{self._role}/{OPTIMIZER}", since)
        peaks = self.peaks.take()
        passes, whole, *largest = self._ranks.max([passes, whole, *(float(peaks.get(name, 0)) for name in PHASES)])
        (peak_rate,) = self._ranks.sum([self._zero.matrix_rate])
        tokens = sum((count_tokens(m, self._zero.arrangement.packed) for m in plan.minibatches), TokenCounts())
        operations = epochs * sum(self._zero.operations.total(samples_of(m)) for m in plan.minibatches)
        measured = {
            "useful_tokens_per_second": epochs * tokens.useful / whole,
            "padding_fraction": tokens.padding / tokens.computed,
            "duplicate_fraction": tokens.duplicated / tokens.computed,
            "flops_per_second": operations / passes,
            "mfu": operations / passes / peak_rate,
            "mfu_with_optimizer": operations / whole / peak_rate,
            **{f"peak_bytes_{name}": peak for name, peak in zip(PHASES, largest, strict=True) if peak > 0},
        }
        return {f"{self._role}/{name}": value for name, value in measured.items()}
