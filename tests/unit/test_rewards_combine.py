"""From what functions said to what trains: sums, None, and the policies for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlhf.rewards import RewardError, RewardInput, RewardResult
from rlhf.rewards.combine import OnError, combine
from rlhf.rewards.types import SampleScore
from rlhf.rewards.worker import CallResult, call


def said(*returned: Any) -> CallResult:
    """What a function that returns these values comes out as."""
    return call(lambda samples: list(returned), [RewardInput(prompt="", response="")] * len(returned))


def scores(results: Sequence[CallResult], weights: Sequence[float], on_error: OnError = "raise") -> list[SampleScore]:
    keys = [f"f{i + 1}" for i in range(len(results))]
    size = max(len(result.values) for result in results)
    return combine(keys, weights, results, prompt_id="p7", sample_indices=range(size), on_error=on_error)


def test_reward_is_the_weighted_sum() -> None:
    # 0.5 * 1 + 2 * 3 = 6.5 and 0.5 * 2 + 2 * -1 = -1
    combined = scores([said(1, 2), said(3, -1)], [0.5, 2.0])
    assert [score.reward for score in combined] == [6.5, -1.0]
    assert combined[0].by_function == {"f1": 1.0, "f2": 3.0}


def test_none_means_that_the_function_does_not_apply() -> None:
    combined = scores([said(1, None), said(None, 2)], [1.0, 1.0])
    assert [score.reward for score in combined] == [1.0, 2.0]
    assert combined[1].by_function == {"f1": None, "f2": 2.0}
    assert all(score.error is None for score in combined)


def test_a_sample_to_which_no_function_applies_is_a_failed_reward() -> None:
    results = [said(1, None), said(None, None)]
    with pytest.raises(RewardError, match="prompt 'p7', sample 1: no reward function applies"):
        scores(results, [1.0, 1.0])
    dropped = scores(results, [1.0, 1.0], "drop")
    assert [score.reward for score in dropped] == [1.0, None]
    assert dropped[0].error is None
    assert dropped[1].error is not None


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 1j, RewardResult(float("nan"))]
)
def test_a_value_that_is_no_finite_number_fails_its_own_sample_only(bad: Any) -> None:
    dropped = scores([said(1, bad, 3)], [1.0], "drop")
    assert [score.reward for score in dropped] == [1.0, None, 3.0]
    assert dropped[1].error is not None
    assert dropped[1].error.startswith("reward function 'f1', prompt 'p7', sample 1: returned the score")
    with pytest.raises(RewardError, match="'f1', prompt 'p7', sample 1"):
        scores([said(1, bad, 3)], [1.0])


def test_a_failed_sample_gets_the_configured_value_and_is_still_counted() -> None:
    combined = scores([said(1, float("nan")), said(5, 5)], [1.0, 1.0], -2.0)
    assert [score.reward for score in combined] == [6.0, -2.0]
    assert combined[1].error is not None
    assert combined[1].by_function == {"f1": None, "f2": 5.0}


def test_scalars_of_numpy_and_booleans_are_numbers() -> None:
    assert [score.reward for score in scores([said(np.float32(0.5), True, np.int64(2))], [1.0])] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0, 3.0], 1.0, None, "11", {0: 1.0, 1: 2.0}])
def test_a_wrong_count_fails_the_whole_group(returned: Any) -> None:
    result = call(lambda samples: returned, [RewardInput(prompt="", response="")] * 2)
    assert result.error is not None
    assert "one score for each of the 2 samples" in result.error
    combined = combine(["f"], [1.0], [result], prompt_id="p", sample_indices=[0, 1], on_error="drop")
    assert [score.reward for score in combined] == [None, None]
    assert combined[0].error is not None
    assert combined[0].error.startswith("reward function 'f', prompt 'p', all 2 samples: returned")


def test_an_array_is_a_sequence_of_scores() -> None:
    result = call(lambda samples: np.array([1.0, 2.0]), [RewardInput(prompt="", response="")] * 2)
    assert [value.score for value in result.values] == [1.0, 2.0]


def test_an_exception_shows_the_end_of_the_users_traceback() -> None:
    def broken(samples: Sequence[RewardInput]) -> list[float]:
        return [1 / 0]

    result = call(broken, [RewardInput(prompt="", response="")])
    assert result.error is not None
    assert "in broken" in result.error
    assert "return [1 / 0]" in result.error
    assert result.error.endswith("ZeroDivisionError: division by zero")


def test_metrics_are_named_after_their_function() -> None:
    combined = scores([said(RewardResult(1.0, {"steps": 3})), said(RewardResult(None, {"steps": 4}))], [1.0, 1.0])
    assert combined[0].metrics == {"f1/steps": 3.0, "f2/steps": 4.0}
    assert combined[0].reward == 1.0


def test_weights_that_add_up_to_1_give_a_perfect_sample_exactly_1() -> None:
    # Added up one after the other, 0.6 + 0.3 + 0.1 is 0.9999999999999999.
    scores = combine(
        ["a", "b", "c"], [0.6, 0.3, 0.1], [said(1.0)] * 3, prompt_id="p", sample_indices=[0], on_error="raise"
    )
    assert scores[0].reward == 1.0
