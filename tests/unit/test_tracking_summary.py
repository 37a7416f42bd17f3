"""Time adds up (invariant 12): phases partition the driver's wall clock, busy time is a union per process."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.tracking.spans import Span
from rlhf.tracking.summary import summarise, union_seconds

_ids = itertools.count()


def span(
    name: str, start: float, end: float, *, role: str = "driver", parent: str | None = "s1", process: str = ""
) -> Span:
    return Span(name, role, 1, start, end, f"id{next(_ids)}", parent, process)


def step(start: float, end: float, number: int = 1, span_id: str = "s1") -> Span:
    return Span("step", "driver", number, start, end, span_id, None)


def test_phases_and_other_partition_the_step() -> None:
    # Step 100..110. rollout 100..104 = 4, update 104..107 = 3, sync 108..109 = 1; 107..108 and 109..110 are other = 2.
    spans = [span("rollout", 100, 104), span("update", 104, 107), span("sync", 108, 109), step(100, 110)]
    assert summarise(spans, 1) == {
        "time/step": 10,
        "time/rollout": 4,
        "time/update": 3,
        "time/sync": 1,
        "time/other": 2,
    }


def test_phase_in_two_pieces_is_summed() -> None:
    spans = [step(0, 10), span("score", 1, 2), span("score", 5, 8)]
    assert summarise(spans, 1)["time/score"] == 4


def test_instant_under_two_phases_counts_for_the_one_that_started_first() -> None:
    # rollout 0..6, score 4..8 beside it: score gets 6..8 = 2. Counted twice, phases would be 10 of 9 seconds.
    metrics = summarise([step(0, 9), span("score", 4, 8), span("rollout", 0, 6)], 1)
    assert metrics == {"time/step": 9, "time/rollout": 6, "time/score": 2, "time/other": 1}


def test_spans_inside_a_phase_are_not_phases() -> None:
    phase = span("update", 0, 4)
    metrics = summarise([step(0, 5), phase, span("pack", 1, 2, parent=phase.span_id)], 1)
    assert "time/pack" not in metrics
    assert metrics["time/other"] == 1


def test_only_the_asked_step_is_summed() -> None:
    spans = [
        step(0, 10),
        span("update", 0, 9),
        step(10, 14, number=2, span_id="s2"),
        span("update", 10, 13, parent="s2"),
    ]
    assert summarise(spans, 2) == {"time/step": 4, "time/update": 3, "time/other": 1}


def test_busy_time_counts_overlapping_spans_of_a_process_once() -> None:
    # 1..4 and 2..6 overlap: union 1..6 = 5, and 7..8 = 1.
    spans = [step(0, 10)] + [span("generate", a, b, role="rollout", process="h:1") for a, b in [(1, 4), (2, 6), (7, 8)]]
    assert summarise(spans, 1)["busy/rollout"] == 6


def test_busy_time_is_the_mean_over_a_roles_processes() -> None:
    # Rank 0 works 4 s, rank 1 works 2 s at the same time: (4 + 2) / 2 = 3.
    spans = [
        step(0, 10),
        span("update", 0, 4, role="policy", process="h:1"),
        span("update", 0, 2, role="policy", process="h:2"),
    ]
    assert summarise(spans, 1)["busy/policy"] == 3


def test_idle_rank_counts_when_the_number_of_ranks_is_given() -> None:
    # Two engines, one of them idle: 4 / 2 = 2. The idle one records nothing, so only `ranks` can tell.
    spans = [step(0, 10), span("generate", 0, 4, role="rollout", process="h:1")]
    assert summarise(spans, 1)["busy/rollout"] == 4
    assert summarise(spans, 1, ranks={"rollout": 2})["busy/rollout"] == 2


def test_busy_time_is_clipped_to_the_step() -> None:
    # Generation that began before the step and goes on after it: 2..12 in a step of 5..10 is 5 s.
    spans = [step(5, 10), span("generate", 2, 12, role="rollout", parent=None, process="h:1")]
    assert summarise(spans, 1)["busy/rollout"] == 5


def test_role_without_work_in_the_step_is_absent() -> None:
    spans = [step(5, 10), span("generate", 0, 4, role="rollout", process="h:1")]
    assert summarise(spans, 1) == {"time/step": 5, "time/other": 5}


@pytest.mark.parametrize("spans", [[], [step(0, 1), step(2, 3)]])
def test_step_without_exactly_one_span_is_an_error(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match=r"step 1: [02] driver spans"):
        summarise(spans, 1)


def test_phase_named_like_a_sum_is_an_error() -> None:
    with pytest.raises(ValueError, match="time/other means something else"):
        summarise([step(0, 2), span("other", 0, 1)], 1)


def test_union_of_intervals() -> None:
    # Nested, touching and apart: 0..4 holds 1..2, 4..5 touches, 7..8 is apart: 5 + 1.
    assert union_seconds([(7, 8), (1, 2), (0, 4), (4, 5)]) == 6
    assert union_seconds([]) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 90), st.integers(0, 40)), max_size=8))
def test_phases_add_up_to_the_step_whatever_overlaps(phases: list[tuple[str, int, int]]) -> None:
    metrics = summarise([step(10, 100), *(span(name, a, a + length) for name, a, length in phases)], 1)
    parts = [value for name, value in metrics.items() if name != "time/step"]
    assert sum(parts) == metrics["time/step"] == 90
    assert min(parts) >= 0
