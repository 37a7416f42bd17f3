"""What happens to a sample's reward before advantages, against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.shaping import clip_reward, eos_penalty, overlong_penalty, shape_rewards, whiten_rewards
from rlhf.config.schema import ShapingConfig
from rlhf.trajectories import FinishReason

REWARDS = st.floats(-1e6, 1e6)


class TestClip:
    @pytest.mark.parametrize(("reward", "expected"), [(3.0, 2.0), (-3.0, -2.0), (1.5, 1.5), (-2.0, -2.0)])
    def test_reward_beyond_the_clip_becomes_the_clip(self, reward: float, expected: float) -> None:
        assert clip_reward(reward, 2.0) == expected

    def test_without_a_clip_the_reward_stays(self) -> None:
        assert clip_reward(1e9, None) == 1e9

    def test_clip_of_zero_leaves_nothing(self) -> None:
        assert clip_reward(5.0, 0.0) == 0.0


class TestEosPenalty:
    def test_response_cut_at_the_token_limit_pays(self) -> None:
        assert eos_penalty("length", 0.5) == 0.5

    @pytest.mark.parametrize("finish_reason", ["stop", "aborted"])
    def test_others_do_not(self, finish_reason: FinishReason) -> None:
        # "stop" is also what ends at a stop string or a stop token of one's own, whatever the last id is.
        assert eos_penalty(finish_reason, 0.5) == 0.0


class TestOverlongPenalty:
    @pytest.mark.parametrize(
        ("length", "expected"),
        # Limit 20, buffer 8: from 12 tokens on, (length - 12) / 8.
        [(1, 0.0), (12, 0.0), (13, 0.125), (14, 0.25), (16, 0.5), (20, 1.0)],
    )
    def test_grows_linearly_over_the_buffer(self, length: int, expected: float) -> None:
        assert overlong_penalty(length, 20, 8, 1.0) == expected

    def test_is_scaled_by_the_penalty(self) -> None:
        # 0.5 * (16 - 12) / 8
        assert overlong_penalty(16, 20, 8, 0.5) == 0.25

    def test_is_largest_beyond_the_limit(self) -> None:
        assert overlong_penalty(30, 20, 8, 0.5) == 0.5

    def test_buffer_of_zero_switches_it_off(self) -> None:
        assert overlong_penalty(20, 20, 0, 1.0) == 0.0


class TestWhitenRewards:
    def test_two_rewards(self) -> None:
        # 1 and 3: mean 2, population standard deviation 1.
        assert whiten_rewards([1.0, 3.0]) == pytest.approx([-1.0, 1.0])

    def test_four_rewards(self) -> None:
        # 0 0 0 4: mean 1, variance (1 + 1 + 1 + 9) / 4 = 3.
        third = 1 / math.sqrt(3)
        assert whiten_rewards([0.0, 0.0, 0.0, 4.0]) == pytest.approx([-third, -third, -third, 3 * third])

    @pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1 + 0.2, 0.3], [7.0], [0.0, 0.0]])
    def test_rewards_that_are_equal_up_to_rounding_give_exactly_zero(self, rewards: list[float]) -> None:
        assert whiten_rewards(rewards) == [0.0] * len(rewards)

    @pytest.mark.parametrize("size", [1e-200, 1e-12, 1.0, 1e200])
    def test_size_does_not_matter(self, size: float) -> None:
        assert whiten_rewards([1 * size, 3 * size]) == pytest.approx([-1.0, 1.0])

    def test_no_rewards(self) -> None:
        assert whiten_rewards([]) == []

    @given(st.lists(REWARDS, min_size=2, max_size=8))
    def test_mean_is_zero_and_standard_deviation_one(self, rewards: list[float]) -> None:
        whitened = whiten_rewards(rewards)
        assert sum(whitened) == pytest.approx(0.0, abs=1e-5)
        if any(whitened):
            assert sum(value * value for value in whitened) / len(whitened) == pytest.approx(1.0, rel=1e-5)


class TestShapeRewards:
    def test_by_default_rewards_stay_as_they_are(self) -> None:
        assert shape_rewards([5.0, -1.0], [20, 3], ["length", "stop"], 20, ShapingConfig()) == [5.0, -1.0]

    def test_penalties_come_off_after_the_clip(self) -> None:
        # Sample 0: 5 clipped to 1, minus 0.25 (cut), minus 0.5 * (20 - 12) / 8. Sample 1: 1 - 0.5 * (14 - 12) / 8.
        config = ShapingConfig(clip=1.0, missing_eos_penalty=0.25, overlong_buffer=8, overlong_penalty=0.5)
        assert shape_rewards([5.0, 1.0], [20, 14], ["length", "stop"], 20, config) == [0.25, 0.875]

    def test_whitening_comes_last(self) -> None:
        # Clipped 1 and 1, the second cut: 1 and 0, so mean 0.5 and standard deviation 0.5.
        config = ShapingConfig(clip=1.0, missing_eos_penalty=1.0, whiten=True)
        assert shape_rewards([2.0, 9.0], [3, 20], ["stop", "length"], 20, config) == pytest.approx([1.0, -1.0])

    def test_penalty_for_a_missing_end_is_applied_once(self) -> None:
        config = ShapingConfig(missing_eos_penalty=0.5)
        assert shape_rewards([1.0, 1.0], [3, 4], ["stop", "length"], 4, config) == [1.0, 0.5]

    @given(st.permutations(range(4)))
    def test_order_of_samples_does_not_matter(self, order: list[int]) -> None:
        rewards, lengths = [1.0, 0.0, 3.0, -7.0], [2, 20, 15, 13]
        reasons: list[FinishReason] = ["stop", "length", "stop", "aborted"]
        config = ShapingConfig(clip=2.0, missing_eos_penalty=0.3, overlong_buffer=8, whiten=True)
        straight = shape_rewards(rewards, lengths, reasons, 20, config)
        shuffled = shape_rewards(
            [rewards[i] for i in order], [lengths[i] for i in order], [reasons[i] for i in order], 20, config
        )
        assert shuffled == pytest.approx([straight[i] for i in order])

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_reward_that_is_not_finite_is_refused_with_its_place(self, reward: float) -> None:
        # With a clip too: infinity must not pass as the clip.
        with pytest.raises(ValueError, match=r"1 of 3 rewards are not finite, first -?(nan|inf) at 1"):
            shape_rewards([1.0, reward, 3.0], [1, 1, 1], ["stop"] * 3, 4, ShapingConfig(clip=1.0))

    @pytest.mark.parametrize(
        ("lengths", "reasons"), [([1], ["stop", "stop"]), ([1, 1], ["stop"]), ([1, 1, 1], ["stop", "stop"])]
    )
    def test_different_numbers_of_entries_are_refused(self, lengths: list[int], reasons: list[FinishReason]) -> None:
        with pytest.raises(ValueError, match=rf"2 rewards, {len(lengths)} lengths and {len(reasons)} finish reasons"):
            shape_rewards([1.0, 1.0], lengths, reasons, 4, ShapingConfig())

    def test_torch_is_not_needed(self) -> None:
        code = "import sys, rlhf.algorithms.shaping; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "False"
