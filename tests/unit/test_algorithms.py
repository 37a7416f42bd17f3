"""Advantages, KL, the PPO loss and aggregation, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.advantages import group_advantages
from rlhf.algorithms.aggregation import Totals, token_weight
from rlhf.algorithms.kl import Estimator, kl_per_token
from rlhf.algorithms.losses import ppo_token_loss, weighted_sum

NAN = float("nan")


class TestGroupAdvantages:
    def test_missing_reward_is_left_out_of_the_statistics(self) -> None:
        # Of 1 and 3: mean 2, population std 1.
        assert group_advantages([1.0, None, 3.0]) == [-1.0, None, 1.0]
        assert group_advantages([1.0, NAN, 3.0]) == [-1.0, None, 1.0]

    def test_four_rewards(self) -> None:
        # 1 0 0 1: mean 0.5, std 0.5.
        assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]

    @pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e-12])
    def test_equal_rewards_give_exactly_zero(self, reward: float) -> None:
        # The mean of three times 0.1 is not 0.1 in floating point.
        assert group_advantages([reward] * 3) == [0.0, 0.0, 0.0]

    def test_small_rewards_are_normalised_like_large_ones(self) -> None:
        for size in (1e-300, 1e-12, 1e300):
            assert group_advantages([1 * size, 3 * size]) == pytest.approx([-1.0, 1.0])

    @pytest.mark.parametrize("rewards", [[], [1.0], [1.0, None], [None, None], [NAN, NAN, 2.0]])
    def test_group_with_fewer_than_two_rewards_is_filtered(self, rewards: list[float | None]) -> None:
        assert group_advantages(rewards) is None

    def test_each_group_has_its_own_baseline(self) -> None:
        # Two prompts, one always right and one always wrong: nothing to learn from either.
        assert group_advantages([1.0] * 4) == group_advantages([0.0] * 4) == [0.0] * 4

    @given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
    def test_advantages_have_mean_zero_and_unit_variance(self, rewards: list[float]) -> None:
        advantages = group_advantages(rewards)
        assert advantages is not None
        values = [a for a in advantages if a is not None]
        assert abs(sum(values)) < 1e-5
        if any(values):
            assert sum(v * v for v in values) / len(values) == pytest.approx(1.0, rel=1e-5)


class TestKL:
    @pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653)])
    def test_values_at_half_a_nat(self, estimator: Estimator, expected: float) -> None:
        # k3 = e^-0.5 - 1 + 0.5 = 0.60653 - 0.5
        value = kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
        assert value.item() == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize(
        ("estimator", "expected"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))], ids=["k1", "k2", "k3"]
    )
    def test_gradients_at_half_a_nat(self, estimator: Estimator, expected: float) -> None:
        logprobs = torch.tensor([-1.0], requires_grad=True)
        kl_per_token(logprobs, torch.tensor([-1.5]), estimator).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("reference", [0.0, -0.5, 0.5, -20.0, 20.0, -100.0, 100.0, -math.inf, math.inf])
    def test_value_gradient_and_step_are_finite(
        self, estimator: Estimator, dtype: torch.dtype, reference: float
    ) -> None:
        logprobs = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        optimizer = torch.optim.AdamW([logprobs])
        value = kl_per_token(logprobs, torch.tensor([reference], dtype=dtype), estimator).sum()
        value.backward()
        optimizer.step()
        assert logprobs.grad is not None
        assert torch.isfinite(value) and torch.isfinite(logprobs.grad).all() and torch.isfinite(logprobs).all()

    @pytest.mark.parametrize("difference", [-60.0, -19.0, 19.0, 30.0, 60.0])
    def test_k3_pulls_towards_the_reference_however_far_it_is(self, difference: float) -> None:
        logprobs = torch.tensor([difference], requires_grad=True)
        kl_per_token(logprobs, torch.zeros(1), "k3").sum().backward()
        assert logprobs.grad is not None
        assert math.copysign(1, logprobs.grad.item()) == math.copysign(1, difference)

    def test_gradient_does_not_reach_the_reference(self) -> None:
        reference = torch.tensor([-1.0], requires_grad=True)
        value = kl_per_token(torch.tensor([-2.0], requires_grad=True), reference, "k3")
        value.sum().backward()
        assert reference.grad is None


class TestPPOLoss:
    def test_values_inside_and_outside_the_clip_range(self) -> None:
        # Ratios 1.5, 1.5, 0.5, 0.5 with clip [0.8, 1.2]:
        # A=+1: -min(1.5, 1.2) = -1.2 clipped; A=-1: max(1.5, 1.2) = 1.5; A=+1: -0.5; A=-1: max(0.5, 0.8) = 0.8 clipped
        ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
        result = ppo_token_loss(ratios.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)
        torch.testing.assert_close(result.loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
        assert result.clipped.tolist() == [True, False, False, True]
        torch.testing.assert_close(result.ratio, ratios)

    def test_clipped_tokens_have_no_gradient_and_others_minus_advantage_times_ratio(self) -> None:
        logprobs = torch.tensor([1.5, 1.5, 0.9]).log().requires_grad_()
        ppo_token_loss(logprobs, torch.zeros(3), torch.tensor([1.0, -1.0, 2.0]), 0.2, 0.2).loss.sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 1.5, -1.8]))

    def test_asymmetric_clip(self) -> None:
        result = ppo_token_loss(torch.tensor([1.25, 0.7]).log(), torch.zeros(2), torch.tensor([1.0, -1.0]), 0.4, 0.28)
        torch.testing.assert_close(result.loss, torch.tensor([-1.25, 0.7]))
        assert not result.clipped.any()

    @pytest.mark.parametrize("difference", [-200.0, 200.0, math.inf, -math.inf])
    def test_far_apart_log_probs_stay_finite(self, difference: float) -> None:
        logprobs = torch.tensor([difference], requires_grad=True)
        loss = ppo_token_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2).loss.sum()
        loss.backward()
        assert logprobs.grad is not None
        assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()

    @given(
        st.lists(st.booleans(), min_size=1, max_size=12),
        st.sampled_from([NAN, math.inf, -math.inf, 1e6]),
        st.integers(0, 2**31),
    )
    def test_masked_values_change_neither_value_nor_gradient(self, kept: list[bool], poison: float, seed: int) -> None:
        mask = torch.tensor(kept)
        generator = torch.Generator().manual_seed(seed)
        logprobs, old, advantages, weights = (torch.randn(len(kept), generator=generator) for _ in range(4))

        def run(fill: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
            leaf = fill(logprobs).requires_grad_()
            loss = ppo_token_loss(leaf, fill(old), fill(advantages), 0.2, 0.2, mask).loss
            total = weighted_sum(loss, fill(weights), mask)
            (gradient,) = torch.autograd.grad(total, leaf)
            return total, gradient

        clean, poisoned = run(torch.clone), run(lambda values: torch.where(mask, values, torch.tensor(poison)))
        assert torch.equal(clean[0], poisoned[0])
        assert torch.equal(clean[1], poisoned[1])
        assert not poisoned[1][~mask].any()

    def test_padding_stays_out_of_a_sequence_level_mean(self) -> None:
        # Mask 1 1 0 0, advantages 1 1 10 10, ratio 1: (-1 - 1) / 2 = -1, and -5.5 if padding counted.
        mask = torch.tensor([True, True, False, False])
        loss = ppo_token_loss(torch.zeros(4), torch.zeros(4), torch.tensor([1.0, 1.0, 10.0, 10.0]), 0.2, 0.2, mask).loss
        weight = token_weight("sequence_mean_token_mean", 2, Totals.of([2], 4))
        assert weighted_sum(loss, torch.full((4,), weight), mask).item() == -1.0


class TestAggregation:
    # Responses of 1 and 3 tokens, cap 4: N = 4, S = 2.
    TOTALS = Totals.of([1, 3], 4)

    @pytest.mark.parametrize(
        ("aggregation", "short", "long", "loss"),
        [
            # Loss with token losses -1 (short) and +1 (long): sum of weight * loss.
            ("token_mean", 1 / 4, 1 / 4, 0.5),
            ("sequence_mean", 1 / 2, 1 / 2, 1.0),
            ("sequence_mean_token_mean", 1 / 2, 1 / 6, 0.0),
            ("constant", 1 / 8, 1 / 8, 0.25),
        ],
    )
    def test_weights_of_one_and_three_tokens(self, aggregation: str, short: float, long: float, loss: float) -> None:
        weights = [token_weight(aggregation, length, self.TOTALS) for length in (1, 3)]  # type: ignore[arg-type]
        assert weights == pytest.approx([short, long])
        assert -1 * weights[0] + 3 * weights[1] == pytest.approx(loss)

    def test_empty_response_has_no_weight_and_is_not_a_sequence(self) -> None:
        totals = Totals.of([0, 3], 4)
        assert totals.sequences == 1
        for aggregation in ("token_mean", "sequence_mean", "sequence_mean_token_mean", "constant"):
            assert token_weight(aggregation, 0, totals) == 0.0  # type: ignore[arg-type]

    @given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
    def test_mean_weights_sum_to_one(self, lengths: list[int]) -> None:
        totals = Totals.of(lengths, 50)
        for aggregation in ("token_mean", "sequence_mean_token_mean"):
            total = sum(n * token_weight(aggregation, n, totals) for n in lengths)  # type: ignore[arg-type]
            assert total == pytest.approx(1.0)
