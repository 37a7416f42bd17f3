"""Every advantage estimator: a number worked out by hand, and the properties that a wrong one breaks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms import registry
from rlhf.algorithms.advantages import (
    ESTIMATORS,
    AdvantageBatch,
    Advantages,
    discounted_sums,
    estimate_advantages,
    whiten,
)
from rlhf.algorithms.registry import register_advantage
from rlhf.config.catalogue import ADVANTAGES, OWN_ADVANTAGES
from rlhf.config.schema import AlgorithmConfig

NAN = math.nan
# Those in which a group's advantages depend on nothing outside it.
WITHIN_GROUPS = ["grpo", "dr_grpo", "rloo", "opo", "maxrl"]
GROUP_BASELINES = [*WITHIN_GROUPS, "reinforce_plus_plus_baseline"]


def float64(values: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def make(
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    penalties: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
    baselines: Sequence[float] | None = None,
) -> AdvantageBatch:
    """A batch, by default of one group of one-token responses without KL."""
    lengths = [1] * len(rewards) if lengths is None else lengths
    return AdvantageBatch(
        float64(rewards),
        torch.tensor([0] * len(rewards) if groups is None else groups, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        float64([0.0] * sum(lengths) if penalties is None else penalties),
        None if values is None else float64(values),
        None if baselines is None else float64(baselines),
    )


def advantages(name: str, batch: AdvantageBatch, **settings: Any) -> list[float]:
    return list(estimate_advantages(batch, AlgorithmConfig(advantage=name, **settings)).advantages_N.tolist())


class TestBatch:
    def test_reward_lands_on_the_last_token_of_its_response(self) -> None:
        # Three tokens and one: nothing lands beyond the end, and what is handed out is the rewards' sum.
        batch = make([1.0, 5.0], lengths=[3, 1])
        assert batch.token_rewards_N.tolist() == [0.0, 0.0, 1.0, 5.0]
        assert batch.rows_N.tolist() == [0, 0, 0, 1]
        assert batch.last_S.tolist() == [2, 3]

    def test_kl_penalty_comes_off_the_reward_of_its_own_token(self) -> None:
        # KL 0.5 a token with coefficient 0.1, reward 1: -0.05 and 1 - 0.05; together 0.9.
        batch = make([1.0], lengths=[2], penalties=[0.05, 0.05])
        assert batch.token_rewards_N.tolist() == pytest.approx([-0.05, 0.95])
        assert batch.sequence_rewards_S.tolist() == pytest.approx([0.9])

    def test_penalties_of_other_responses_do_not_count(self) -> None:
        # 1 - (0.1 + 0.2), 2 - 0.4
        batch = make([1.0, 2.0], lengths=[2, 1], penalties=[0.1, 0.2, 0.4])
        assert batch.sequence_rewards_S.tolist() == pytest.approx([0.7, 1.6])

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"lengths": [2, 0]}, "lengths_S holds 0: a response has at least one token"),
            ({"lengths": [1, 2]}, r"penalties_N is torch.float64 of shape \[2\]: torch.float64 of shape \[3\]"),
            ({"lengths": [1]}, r"lengths_S is torch.int64 of shape \[1\]: torch.int64 of shape \[2\]"),
            ({"groups": [0]}, r"groups_S is torch.int64 of shape \[1\]"),
            ({"values": [0.0]}, r"values_N is torch.float64 of shape \[1\]"),
            ({"baselines": [0.0]}, r"baselines_S is torch.float64 of shape \[1\]"),
            ({"rewards": [1.0, NAN]}, "rewards_S: 1 of 2 are not finite, first nan at 1"),
            ({"rewards": [math.inf, NAN]}, "rewards_S: 2 of 2 are not finite, first inf at 0"),
            ({"penalties": [0.0, -math.inf]}, "penalties_N: 1 of 2 are not finite, first -inf at 1"),
            ({"rewards": [], "groups": [], "lengths": [], "penalties": []}, "^advantages of no samples: .* needed$"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change: dict[str, Any], expected: str) -> None:
        arguments = {"rewards": [1.0, 2.0], "groups": [0, 0], "lengths": [1, 1], "penalties": [0.0, 0.0], **change}
        with pytest.raises(ValueError, match=expected):
            make(**arguments)

    @pytest.mark.parametrize("name", ["rewards_S", "penalties_N", "groups_S", "lengths_S"])
    def test_other_dtypes_are_refused(self, name: str) -> None:
        batch = make([1.0, 2.0])
        with pytest.raises(ValueError, match=rf"{name} is torch\.(float32|int32)"):
            replace(batch, **{name: getattr(batch, name).to(torch.float32 if name[0] in "rp" else torch.int32)})


class TestGae:
    def test_reward_at_the_end_is_discounted_towards_the_start(self) -> None:
        # Rewards 0 1, values 0: A_1 = 1, A_0 = 0.95 * 1.
        batch = make([1.0], lengths=[2], values=[0.0, 0.0])
        assert advantages("gae", batch, whiten=False, gae_lambda=0.95) == pytest.approx([0.95, 1.0])

    def test_values_discount_and_lambda(self) -> None:
        # Rewards 0 2, values 0.5 1, gamma 0.9, lambda 0.5:
        # delta_1 = 2 - 1 = 1; delta_0 = 0.9 * 1 - 0.5 = 0.4; A_1 = 1; A_0 = 0.4 + 0.45 * 1 = 0.85; returns 1.35, 2.
        batch = make([2.0], lengths=[2], values=[0.5, 1.0])
        config = AlgorithmConfig(advantage="gae", whiten=False, gamma=0.9, gae_lambda=0.5)
        found = estimate_advantages(batch, config)
        assert found.advantages_N.tolist() == pytest.approx([0.85, 1.0])
        assert found.returns_N is not None
        assert found.returns_N.tolist() == pytest.approx([1.35, 2.0])

    def test_value_of_the_next_response_is_not_the_value_of_the_state_after_the_last_token(self) -> None:
        # Two responses of one token: 1 - 0.5 and 1 - 100; with the second's value in the first it would be 100.5.
        batch = make([1.0, 1.0], values=[0.5, 100.0])
        assert advantages("gae", batch, whiten=False) == pytest.approx([0.5, -99.0])

    def test_whitening_leaves_the_returns_alone(self) -> None:
        # Advantages 0.95 and 1: mean 0.975, standard deviation 0.025. Returns are those before whitening, plus 0.
        found = estimate_advantages(make([1.0], lengths=[2], values=[0.0, 0.0]), AlgorithmConfig(advantage="gae"))
        assert found.returns_N is not None
        assert found.advantages_N.tolist() == pytest.approx([-1.0, 1.0])
        assert found.returns_N.tolist() == pytest.approx([0.95, 1.0])

    def test_lambda_of_one_gives_the_return_minus_the_value(self) -> None:
        # Token rewards -0.1 0.9, gamma 0.5: returns -0.1 + 0.45 = 0.35 and 0.9; minus values 0.2 and 0.3.
        batch = make([1.0], lengths=[2], penalties=[0.1, 0.1], values=[0.2, 0.3])
        assert advantages("gae", batch, whiten=False, gamma=0.5, gae_lambda=1.0) == pytest.approx([0.15, 0.6])

    def test_exactly_the_response_tokens_have_an_advantage(self) -> None:
        # Responses of 2 and 4 tokens: 6 advantages, none of them 0.
        batch = make([1.0, 1.0], lengths=[2, 4], values=[0.3, -0.2, 0.1, 0.7, -0.4, 0.25])
        found = advantages("gae", batch, whiten=False)
        assert len(found) == 6 and all(found)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [(None, "gae needs the critic's values, and the batch has no values_N"), ([0.0, NAN], "values_N: 1 of 2 are")],
    )
    def test_missing_values_are_refused(self, values: list[float] | None, expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            advantages("gae", make([1.0], lengths=[2], values=values))


class TestGrpo:
    def test_four_rewards(self) -> None:
        # 1 0 0 1: mean 0.5, population standard deviation 0.5.
        assert advantages("grpo", make([1.0, 0.0, 0.0, 1.0])) == [1.0, -1.0, -1.0, 1.0]

    def test_standard_deviation_is_that_of_the_population(self) -> None:
        # What is left of 1, NaN, 3: mean 2, standard deviation 1 (the unbiased one would be 1.414).
        assert advantages("grpo", make([1.0, 3.0])) == [-1.0, 1.0]

    def test_response_shares_its_advantage_with_all_its_tokens(self) -> None:
        assert advantages("grpo", make([1.0, 3.0], lengths=[2, 3])) == [-1.0, -1.0, 1.0, 1.0, 1.0]

    def test_batch_normalisation_divides_by_the_deviation_of_all_rewards(self) -> None:
        # Groups 0 2 and 4 6: deviations -1 1 -1 1; all rewards: mean 3, variance (9 + 1 + 1 + 9) / 4 = 5.
        batch = make([0.0, 2.0, 4.0, 6.0], groups=[7, 7, 3, 3])
        fifth = 1 / math.sqrt(5)
        assert advantages("grpo", batch, normalize="batch") == pytest.approx([-fifth, fifth, -fifth, fifth])

    def test_without_normalisation_it_is_dr_grpo(self) -> None:
        batch = make([0.0, 3.0, 4.0, 4.5], groups=[0, 1, 0, 1])
        assert advantages("grpo", batch, normalize="none") == advantages("dr_grpo", batch) == [-2.0, -0.75, 2.0, 0.75]

    @pytest.mark.parametrize("size", [1e-300, 1e-12, 1.0, 1e300])
    def test_size_of_rewards_does_not_matter(self, size: float) -> None:
        assert advantages("grpo", make([1 * size, 3 * size])) == pytest.approx([-1.0, 1.0])

    @given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.integers(1, 1000), st.integers(-1000, 1000))
    def test_scale_and_offset_of_rewards_do_not_matter(self, rewards: list[int], scale: int, offset: int) -> None:
        moved = advantages("grpo", make([scale * reward + offset for reward in rewards]))
        assert moved == pytest.approx(advantages("grpo", make(rewards)), abs=1e-9)

    @given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=2, max_size=8))  # subnormals lack digits
    def test_advantages_have_mean_zero_and_standard_deviation_one(self, rewards: list[float]) -> None:
        found = advantages("grpo", make(rewards))
        assert sum(found) == pytest.approx(0.0, abs=1e-5)
        if any(found):
            assert sum(value * value for value in found) / len(found) == pytest.approx(1.0, rel=1e-5)


class TestOtherGroupBaselines:
    def test_dr_grpo_subtracts_the_mean(self) -> None:
        # Mean (1 + 2 + 6) / 3 = 3.
        assert advantages("dr_grpo", make([1.0, 2.0, 6.0])) == pytest.approx([-2.0, -1.0, 3.0])

    def test_rloo_subtracts_the_mean_of_the_others(self) -> None:
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
        assert advantages("rloo", make([1.0, 2.0, 6.0])) == pytest.approx([-3.0, -1.5, 4.5])

    def test_opo_weighs_the_baseline_with_lengths(self) -> None:
        # Baseline (1 * 4 + 3 * 0) / 4 = 1.
        assert advantages("opo", make([4.0, 0.0], lengths=[1, 3])) == pytest.approx([3.0, -1.0, -1.0, -1.0])

    def test_reinforce_plus_plus_baseline_counts_a_sample_once_for_each_token(self) -> None:
        # Group 0 2: deviations -1, and 1 on three tokens. Over the 4 tokens: mean 0.5, variance
        # (2.25 + 3 * 0.25) / 4 = 0.75, so -1.5 / sqrt(0.75) and 0.5 / sqrt(0.75).
        batch = make([0.0, 2.0], lengths=[1, 3])
        expected = [-1.5 / math.sqrt(0.75)] + [0.5 / math.sqrt(0.75)] * 3
        assert advantages("reinforce_plus_plus_baseline", batch) == pytest.approx(expected)

    def test_reinforce_plus_plus_baseline_whitens_over_all_groups(self) -> None:
        # Groups 0 2 and 0 6: deviations -1 1 -3 3: mean 0, variance (1 + 1 + 9 + 9) / 4 = 5.
        batch = make([0.0, 2.0, 0.0, 6.0], groups=[0, 0, 1, 1])
        expected = [value / math.sqrt(5) for value in (-1, 1, -3, 3)]
        assert advantages("reinforce_plus_plus_baseline", batch) == pytest.approx(expected)

    def test_maxrl_divides_by_the_mean(self) -> None:
        # One of four right: mean 0.25: (1 - 0.25) / 0.25 = 3 and -0.25 / 0.25 = -1.
        assert advantages("maxrl", make([1.0, 0.0, 0.0, 0.0])) == pytest.approx([3.0, -1.0, -1.0, -1.0])

    def test_maxrl_takes_the_mean_of_each_group(self) -> None:
        # Means 0.5 and 2: 1, -1; (1 - 2) / 2, (3 - 2) / 2.
        batch = make([1.0, 1.0, 0.0, 3.0], groups=[0, 1, 0, 1])
        assert advantages("maxrl", batch) == pytest.approx([1.0, -0.5, -1.0, 0.5])

    def test_maxrl_learns_nothing_from_a_group_without_reward(self) -> None:
        batch = make([0.0, 1.0, 0.0, 0.0], groups=[0, 1, 0, 1])
        assert advantages("maxrl", batch) == [0.0, 1.0, 0.0, -1.0]

    def test_maxrl_refuses_negative_rewards(self) -> None:
        with pytest.raises(ValueError, match=r"maxrl needs rewards of at least 0.*1 of 4 are negative.*-0\.5"):
            advantages("maxrl", make([1.0, 0.5, 0.0, -0.5]))

    def test_maxrl_refuses_kl_in_the_reward(self) -> None:
        with pytest.raises(ValueError, match=r"^maxrl can't have KL in the reward.*kl\.where=loss$"):
            advantages("maxrl", make([1.0, 0.0], penalties=[0.0, 0.1]))

    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
    def test_rloo_is_dr_grpo_scaled_by_n_over_n_minus_one(self, rewards: list[float]) -> None:
        factor = len(rewards) / (len(rewards) - 1)
        expected = [factor * value for value in advantages("dr_grpo", make(rewards))]
        assert advantages("rloo", make(rewards)) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo"])
    @given(st.lists(st.integers(-5, 5), min_size=2, max_size=6), st.integers(-9, 9))
    def test_offset_does_not_matter_and_scale_scales(self, name: str, rewards: list[int], offset: int) -> None:
        lengths = [1 + index % 3 for index in range(len(rewards))]
        moved = advantages(name, make([2 * reward + offset for reward in rewards], lengths=lengths))
        expected = [2 * value for value in advantages(name, make(rewards, lengths=lengths))]
        assert moved == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline"])
    @given(st.lists(st.integers(0, 9), min_size=2, max_size=8))
    def test_advantages_of_a_group_add_up_to_zero(self, name: str, rewards: list[int]) -> None:
        assert sum(advantages(name, make(rewards))) == pytest.approx(0.0, abs=1e-9)

    @given(st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 4)), min_size=2, max_size=6))
    def test_opo_advantages_of_a_group_add_up_to_zero_over_tokens(self, samples: list[tuple[int, int]]) -> None:
        rewards, lengths = zip(*samples, strict=True)
        assert sum(advantages("opo", make(rewards, lengths=lengths))) == pytest.approx(0.0, abs=1e-9)


class TestGroups:
    @pytest.mark.parametrize("name", GROUP_BASELINES)
    def test_one_prompt_always_right_and_one_always_wrong_give_exactly_zero(self, name: str) -> None:
        batch = make([1.0, 0.0] * 4, groups=[5, 2] * 4, lengths=[1, 2, 3, 1, 2, 3, 1, 2])
        assert advantages(name, batch) == [0.0] * 15

    @pytest.mark.parametrize("name", GROUP_BASELINES)
    @pytest.mark.parametrize("rewards", [[0.0] * 3, [0.1] * 3, [7.3] * 7, [1e-12] * 3, [0.1 + 0.2, 0.3, 0.3]])
    def test_rewards_that_are_equal_up_to_rounding_give_exactly_zero(self, name: str, rewards: list[float]) -> None:
        # The mean of three times 0.1 is not 0.1 in floating point, nor is 0.1 + 0.2 equal to 0.3.
        assert not any(advantages(name, make(rewards, lengths=[1 + i % 3 for i in range(len(rewards))])))

    @pytest.mark.parametrize("normalize", ["group", "batch", "none"])
    def test_equal_rewards_give_exactly_zero_with_every_normalisation_and_sign(self, normalize: str) -> None:
        for rewards in ([0.1] * 3, [-0.1 - 0.2, -0.3, -0.3]):
            assert advantages("grpo", make(rewards), normalize=normalize) == [0.0] * 3

    @pytest.mark.parametrize("name", GROUP_BASELINES)
    def test_only_survivor_of_a_group_has_advantage_zero(self, name: str) -> None:
        # Nothing is left to compare it with, and nothing becomes NaN.
        assert advantages(name, make([1.0], lengths=[2])) == [0.0, 0.0]
        assert advantages(name, make([1.0, 2.0, 4.0], groups=[0, 1, 1]))[0] == 0.0

    @pytest.mark.parametrize("name", WITHIN_GROUPS)
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 3)), min_size=2, max_size=8))
    def test_advantages_of_a_group_are_those_of_the_group_alone(
        self, name: str, samples: list[tuple[int, int, int]]
    ) -> None:
        rewards, groups, lengths = zip(*samples, strict=True)
        batch = make(rewards, groups, lengths)
        found = float64(advantages(name, batch))
        for group in set(groups):
            rows = [row for row, other in enumerate(groups) if other == group]
            alone = advantages(name, make([rewards[row] for row in rows], lengths=[lengths[row] for row in rows]))
            assert found[(batch.groups_S == group)[batch.rows_N]].tolist() == pytest.approx(alone, abs=1e-9)


class TestWithoutGroups:
    def test_reinforce_sums_the_rewards_from_each_token_on(self) -> None:
        # Token rewards -0.05 0.95: returns 0.90 0.95.
        batch = make([1.0], lengths=[2], penalties=[0.05, 0.05])
        assert advantages("reinforce", batch) == pytest.approx([0.90, 0.95])

    def test_reinforce_discounts(self) -> None:
        # Rewards 0 0 8 and 2, gamma 0.5.
        assert advantages("reinforce", make([8.0, 2.0], lengths=[3, 1]), gamma=0.5) == [2.0, 4.0, 8.0, 2.0]

    def test_reinforce_plus_plus_whitens_over_all_tokens_of_the_batch(self) -> None:
        # Returns 1 1 and 3 3: mean 2, standard deviation 1; for each sample alone it would be 0.
        batch = make([1.0, 3.0], groups=[0, 1], lengths=[2, 2])
        assert advantages("reinforce_plus_plus", batch) == pytest.approx([-1.0, -1.0, 1.0, 1.0])

    def test_reinforce_plus_plus_discounts_before_it_whitens(self) -> None:
        # Rewards 0 4, gamma 0.5: returns 2 4: mean 3, standard deviation 1.
        assert advantages("reinforce_plus_plus", make([4.0], lengths=[2]), gamma=0.5) == pytest.approx([-1.0, 1.0])

    @pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
    def test_single_samples_of_a_prompt_learn(self, name: str) -> None:
        # Rewards 1 0 1 0, each of another prompt.
        found = advantages(name, make([1.0, 0.0, 1.0, 0.0], groups=[0, 1, 2, 3]))
        assert found[0] == found[2] > found[1] == found[3]

    def test_remax_subtracts_the_reward_of_the_greedy_response(self) -> None:
        # 1 - 0.25, 0 - 1, and with KL 0.5 - (0.1 + 0.1) - 0.5
        batch = make([1.0, 0.0, 0.5], lengths=[1, 1, 2], penalties=[0.0, 0.0, 0.1, 0.1], baselines=[0.25, 1.0, 0.5])
        assert advantages("remax", batch) == pytest.approx([0.75, -1.0, -0.2, -0.2])

    @pytest.mark.parametrize(
        ("baselines", "expected"),
        [
            (None, "remax needs the rewards of greedy responses, and the batch has no baselines_S"),
            ([0.0, math.inf], "baselines_S: 1 of 2 are not finite, first inf at 1"),
        ],
    )
    def test_remax_without_baselines_is_refused(self, baselines: list[float] | None, expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            advantages("remax", make([1.0, 0.0], baselines=baselines))


class TestAllEstimators:
    def test_each_name_of_the_catalogue_has_its_function(self) -> None:
        assert set(ESTIMATORS) == set(ADVANTAGES)

    @pytest.mark.parametrize("name", ADVANTAGES)
    def test_better_response_has_the_larger_advantage_at_its_end(self, name: str) -> None:
        batch = make([0.0, 1.0, 3.0], lengths=[2, 1, 3], values=[0.0] * 6, baselines=[1.0] * 3)
        at_end = float64(advantages(name, batch))[batch.last_S]
        assert at_end[0] < at_end[1] < at_end[2]

    @pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"maxrl"}))
    def test_kl_in_the_reward_changes_the_advantages(self, name: str) -> None:
        free = make([1.0, 1.0, 0.0], lengths=[2, 2, 1], values=[0.0] * 5, baselines=[0.5] * 3)
        charged = replace(free, penalties_N=float64([0.0, 0.0, 0.3, 0.3, 0.0]))
        before, after = advantages(name, free), advantages(name, charged)
        assert after[2] < after[0] and after != pytest.approx(before)

    @pytest.mark.parametrize("name", ADVANTAGES)
    @given(st.data())
    def test_order_of_samples_does_not_matter(self, name: str, data: st.DataObject) -> None:
        count = data.draw(st.integers(2, 6))
        numbers = st.integers(0, 9)
        rewards, groups, baselines = (
            data.draw(st.lists(values, min_size=count, max_size=count))
            for values in (numbers, st.integers(0, 1), numbers)
        )
        lengths = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
        values = data.draw(st.lists(numbers, min_size=sum(lengths), max_size=sum(lengths)))
        order = data.draw(st.permutations(range(count)))
        straight = make(rewards, groups, lengths, values=values, baselines=baselines)
        tokens = torch.cat([(straight.rows_N == row).nonzero().flatten() for row in order])
        shuffled = make(
            [rewards[row] for row in order],
            [groups[row] for row in order],
            [lengths[row] for row in order],
            values=[values[token] for token in tokens.tolist()],
            baselines=[baselines[row] for row in order],
        )
        expected = float64(advantages(name, straight))[tokens].tolist()
        assert advantages(name, shuffled) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"gae", "remax"}))
    @pytest.mark.parametrize("poison", [NAN, math.inf, 1e6])
    def test_arrays_that_an_estimator_does_not_need_do_not_reach_it(self, name: str, poison: float) -> None:
        clean = make([1.0, 0.0, 3.0], groups=[0, 0, 1], lengths=[1, 2, 1])
        poisoned = replace(clean, values_N=float64([poison] * 4), baselines_S=float64([poison] * 3))
        assert advantages(name, poisoned) == advantages(name, clean)

    @pytest.mark.parametrize("name", ADVANTAGES)
    def test_inputs_are_not_changed_and_results_are_float64(self, name: str) -> None:
        batch = make([1.0, 0.0], lengths=[2, 1], values=[0.1, 0.2, 0.3], baselines=[0.5, 0.5])
        fields = ("rewards_S", "groups_S", "lengths_S", "penalties_N", "values_N", "baselines_S")
        before = [getattr(batch, field).clone() for field in fields]
        assert estimate_advantages(batch, AlgorithmConfig(advantage=name)).advantages_N.dtype == torch.float64
        assert all(torch.equal(getattr(batch, field), old) for field, old in zip(fields, before, strict=True))

    def test_rewards_too_large_to_subtract_are_refused_and_not_turned_into_nan(self) -> None:
        with pytest.raises(ValueError, match=r"dr_grpo: its advantages: \d of 2 are not finite"):
            advantages("dr_grpo", make([1.7e308, -1.7e308]))

    def test_unknown_estimator_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unknown advantage estimator 'grop': use one of gae, grpo"):
            advantages("grop", make([1.0]))


class TestWhiten:
    def test_four_values(self) -> None:
        # 1 1 3 3: mean 2, population standard deviation 1.
        assert whiten(float64([1, 1, 3, 3])).tolist() == [-1.0, -1.0, 1.0, 1.0]

    @pytest.mark.parametrize("values", [[5.0], [0.1] * 3, [0.1 + 0.2, 0.3], [0.0, 0.0]])
    def test_values_that_are_equal_up_to_rounding_give_exactly_zero(self, values: list[float]) -> None:
        assert whiten(float64(values)).tolist() == [0.0] * len(values)

    def test_small_spread_on_a_large_offset_keeps_its_digits(self) -> None:
        # The naive mean of squares minus square of the mean has no digit left here.
        assert whiten(float64([1e6 + 1, 1e6 + 3])).tolist() == pytest.approx([-1.0, 1.0], rel=1e-12)


class TestDiscountedSums:
    def test_three_tokens(self) -> None:
        # y_2 = 4, y_1 = 2 + 0.5 * 4, y_0 = 1 + 0.5 * 4
        assert discounted_sums(values := float64([1, 2, 4]), torch.tensor([3]), 0.5).tolist() == [3.0, 4.0, 4.0]
        assert values.tolist() == [1.0, 2.0, 4.0]

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([0.5, 0.9, 1.0]))
    def test_each_sample_is_summed_on_its_own(self, lengths: list[int], factor: float) -> None:
        values = list(range(1, sum(lengths) + 1))
        expected: list[float] = []
        for end in itertools.accumulate(lengths):
            start = len(expected)
            expected += [sum(factor ** (u - t) * values[u] for u in range(t, end)) for t in range(start, end)]
        assert discounted_sums(float64(values), torch.tensor(lengths), factor).tolist() == pytest.approx(expected)


class TestOwnEstimators:
    @pytest.fixture(autouse=True)
    def nothing_registered(self) -> Iterator[None]:
        yield
        OWN_ADVANTAGES.clear()
        registry._ADVANTAGES.functions.clear()

    def test_registered_estimator_is_called_with_batch_and_settings(self) -> None:
        @register_advantage("scaled")
        def scaled(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
            return batch.rewards_S * float(config.options["scale"])

        batch = make([1.0, 2.0], lengths=[2, 1])
        assert advantages("scaled", batch, options={"scale": 3}) == [3.0, 3.0, 6.0]

    @pytest.mark.parametrize("name", ["my_module:mine", "grpo"])
    def test_estimator_that_is_handed_in_takes_the_place_of_the_named_one(self, name: str) -> None:
        batch = make([1.0, 2.0], lengths=[2, 1])
        found = estimate_advantages(batch, AlgorithmConfig(advantage=name), lambda batch, _: batch.rewards_S)
        assert found.advantages_N.tolist() == [1.0, 1.0, 2.0]
        assert found.returns_N is None

    def test_float32_result_becomes_float64_without_a_gradient(self) -> None:
        leaf = torch.ones(2, requires_grad=True)
        found = estimate_advantages(make([1.0, 2.0]), AlgorithmConfig(advantage="a:b"), lambda batch, _: leaf * 2)
        assert found.advantages_N.dtype == torch.float64 and not found.advantages_N.requires_grad

    def test_returns_for_the_critic_are_passed_on(self) -> None:
        own = Advantages(float64([1.0, 2.0, 3.0]), float64([4.0, 5.0, 6.0]))
        found = estimate_advantages(make([1.0, 2.0], lengths=[2, 1]), AlgorithmConfig(advantage="a:b"), lambda *_: own)
        assert found.returns_N is not None
        assert found.returns_N.tolist() == [4.0, 5.0, 6.0]

    @pytest.mark.parametrize(
        ("result", "expected"),
        [
            (float64([1.0, NAN, math.inf]), "a:b: its advantages: 2 of 3 are not finite, first nan at 1"),
            (float64([1.0]), r"a:b: its advantages have the shape \[1\], needed is \[2\].* or \[3\]"),
            (torch.ones(1, 3), r"a:b: its advantages have the shape \[1, 3\]"),
            ([1.0, 2.0, 3.0], "a:b: its advantages are a list, a tensor is needed"),
            (None, "a:b: its advantages are a NoneType"),
            (Advantages(float64([1.0, 2.0]), float64([NAN] * 3)), "a:b: its returns: 3 of 3 are not finite"),
            (Advantages(float64([1.0, 2.0]), float64([1.0])), r"a:b: its returns have the shape \[1\]"),
        ],
    )
    def test_wrong_result_is_refused_with_the_estimators_name(self, result: Any, expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            estimate_advantages(make([1.0, 2.0], lengths=[2, 1]), AlgorithmConfig(advantage="a:b"), lambda *_: result)

    def test_one_advantage_a_token_is_refused_where_one_a_response_was_declared(self) -> None:
        register_advantage("mine", level="sequence")(lambda batch, config: batch.token_rewards_N)
        with pytest.raises(ValueError, match=r"mine: .* shape \[3\], needed is \[2\], .*, as it has no level='token'$"):
            advantages("mine", make([1.0, 2.0], lengths=[2, 1]))

    def test_what_it_needs_must_be_there(self) -> None:
        register_advantage("mine", needs_critic=True)(lambda batch, config: batch.rewards_S)
        with pytest.raises(ValueError, match="mine needs the critic's values"):
            advantages("mine", make([1.0]))
