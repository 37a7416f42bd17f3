"""The machine's matrix rate: the fastest product that fits into a budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlhf.learners.rate import BUDGET_S, best_rate, matrix_rate


def counted(seconds: list[float]) -> tuple[Callable[[], None], Callable[[], float], list[float]]:
    """Work whose calls take so many seconds on a clock of its own, that clock, and the times at which calls ended."""
    now, ends = 0.0, list[float]()

    def work() -> None:
        nonlocal now
        now += seconds[len(ends)]
        ends.append(now)

    return work, lambda: now, ends


def test_rate_is_that_of_the_fastest_call() -> None:
    # 100 operations: in 0.15, 0.05 and 0.1 seconds. The budget of 0.25 is over after the third.
    work, clock, ends = counted([0.15, 0.05, 0.1, 0.01])
    assert best_rate(work, 100.0, clock) == pytest.approx(100 / 0.05)
    assert len(ends) == 3


def test_no_call_begins_when_the_budget_is_over() -> None:
    work, clock, ends = counted([BUDGET_S + 1, 0.01])
    assert best_rate(work, 100.0, clock) == pytest.approx(100 / (BUDGET_S + 1))
    assert len(ends) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_draws_nothing_from_the_random_stream(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    assert matrix_rate(torch.device("cpu"), dtype) > 0
    assert torch.equal(torch.get_rng_state(), before)
