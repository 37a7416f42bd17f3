"""The metrics of an update's speed and memory, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.batching import MicroBatch, Minibatch, Plan, SampleLength
from rlhf.learners import gauge as gauge_module
from rlhf.learners.gauge import Gauge
from rlhf.models.operations import Operations
from rlhf.tracking.metrics import lookup
from rlhf.tracking.spans import Span, SpanRecorder

# One optimizer step of one rank, padded: rows of 6 and 4 tokens, prompt 2. Useful 2 + 4 + 2 = 8, the prompt again 2,
# padding 2: 12 computed.
SAMPLES = (SampleLength("0-0", 0, 6, 2), SampleLength("0-1", 0, 4, 2))
PLAN = Plan((Minibatch(((MicroBatch(SAMPLES),),)),))
# 8 tokens x 5 + 6 response tokens x 10 = 100 operations, and no layer attends.
OPERATIONS = Operations(5.0, 10.0, 0.0, ())


class OtherRank:
    """This rank beside one that takes twice as long, holds twice as much and multiplies as fast."""

    device = torch.device("cpu")

    def max(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values]


def make(monkeypatch: pytest.MonkeyPatch, passes: Sequence[float], optimizer: Sequence[float]) -> Gauge:
    """A gauge whose update took these seconds, after an earlier one that nobody drained."""
    recorder = SpanRecorder("policy")
    monkeypatch.setattr(gauge_module, "recorder", recorder)
    for name, lengths in (("policy/forward_backward", passes), ("policy/optimizer", optimizer)):
        recorder.absorb([Span(name, "policy", 1, 1.0, 100.0, "", None)])
        recorder.absorb(Span(name, "policy", 2, 200.0, 200.0 + seconds, "", None) for seconds in lengths)
    zero: Any = SimpleNamespace(operations=OPERATIONS, matrix_rate=50.0, arrangement=SimpleNamespace(packed=False))
    ranks: Any = OtherRank()
    return Gauge("policy", zero, ranks)


def test_rates_are_of_useful_work_over_the_time_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forward and backward took 1.5 + 0.5 = 2 s here and 4 s there; with the optimizer 2.5 and 5. The ranks together
    # multiply with 2 x 50 FLOP/s.
    metrics = make(monkeypatch, [1.5, 0.5], [0.5]).read(PLAN, 1, since=150.0)
    assert metrics == {
        "policy/useful_tokens_per_second": pytest.approx(8 / 5),
        "policy/padding_fraction": pytest.approx(2 / 12),
        "policy/duplicate_fraction": pytest.approx(2 / 12),
        "policy/flops_per_second": pytest.approx(100 / 4),
        "policy/mfu": pytest.approx(0.25),
        "policy/mfu_with_optimizer": pytest.approx(0.2),
    }


def test_every_pass_over_the_batch_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = make(monkeypatch, [2.0], [0.5]).read(PLAN, 3, since=150.0)
    assert metrics["policy/useful_tokens_per_second"] == pytest.approx(3 * 8 / 5)
    assert metrics["policy/mfu"] == pytest.approx(3 * 0.25)
    assert metrics["policy/padding_fraction"] == pytest.approx(2 / 12)


def test_peak_of_a_phase_is_that_of_the_largest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = make(monkeypatch, [2.0], [0.5])
    monkeypatch.setattr(gauge.peaks, "take", lambda: {"optimizer": 7})
    metrics = gauge.read(PLAN, 1, since=150.0)
    assert {name: value for name, value in metrics.items() if "peak" in name} == {"policy/peak_bytes_optimizer": 14.0}


def test_every_metric_is_in_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = make(monkeypatch, [2.0], [0.5])
    monkeypatch.setattr(gauge.peaks, "take", lambda: dict.fromkeys(gauge_module.PHASES, 1))
    assert all(lookup(name) for name in gauge.read(PLAN, 1, since=150.0))


def test_phase_of_an_update_is_a_span_and_has_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpanRecorder("policy")
    monkeypatch.setattr(gauge_module, "span", recorder.span)
    gauge = make(monkeypatch, [2.0], [0.5])
    with gauge.phase("optimizer", 3):
        pass
    (recorded,) = recorder.drain()
    assert (recorded.name, recorded.step) == ("policy/optimizer", 3)
    assert set(gauge.peaks.take()) <= {"optimizer"}
