"""The learning rate as a closed form of the step."""

from __future__ import annotations

import pytest

from rlhf.config.schema import PolicyConfig
from rlhf.learners.schedule import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    config = PolicyConfig.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_rises_from_zero_before_step_1_to_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_zero_at_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    # (1 + cos(pi / 4)) / 2 = 0.853553
    assert rates(5, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_step_has_the_full_rate(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [1.0]
