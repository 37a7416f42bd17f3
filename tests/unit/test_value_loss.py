"""The critic's loss and the explained variance, by numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algorithms.value import explained_variance, value_loss

NAN, INF = float("nan"), math.inf


class TestValueLoss:
    # Old value 0, clip 0.2.
    # v = 0.1, R = 1: within the clip: 0.9^2 / 2 = 0.405
    # v = 0.5, R = 1: clipped to 0.2: max(0.5^2, 0.8^2) / 2 = 0.32, no gradient
    # v = 0.5, R = 0: max(0.5^2, 0.2^2) / 2 = 0.125, gradient 0.5
    # v = -0.5, R = -1: clipped to -0.2: 0.8^2 / 2 = 0.32, no gradient
    VALUES, RETURNS = torch.tensor([0.1, 0.5, 0.5, -0.5]), torch.tensor([1.0, 1.0, 0.0, -1.0])

    def test_larger_of_the_free_and_the_clipped_error(self) -> None:
        result = value_loss(self.VALUES, torch.zeros(4), self.RETURNS, 0.2)
        torch.testing.assert_close(result.loss_N, torch.tensor([0.405, 0.32, 0.125, 0.32]))
        assert result.clipped_N.tolist() == [False, True, False, True]

    def test_gradient_is_the_error_and_zero_where_clipped(self) -> None:
        values = self.VALUES.clone().requires_grad_()
        value_loss(values, torch.zeros(4), self.RETURNS, 0.2).loss_N.sum().backward()
        torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, 0.5, 0.0]))

    def test_clip_range_lies_around_the_old_value(self) -> None:
        # old 3, v = 2, clip 0.5: 2.5; R = 1: max(1^2, 1.5^2) / 2 = 1.125
        result = value_loss(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([1.0]), 0.5)
        assert result.loss_N.item() == 1.125 and result.clipped_N.item()

    def test_without_clip_it_is_half_the_squared_error(self) -> None:
        # 0.9^2, 0.5^2, 0.5^2, 0.5^2, halves
        result = value_loss(self.VALUES, torch.zeros(4), self.RETURNS, None)
        torch.testing.assert_close(result.loss_N, torch.tensor([0.405, 0.125, 0.125, 0.125]))
        assert result.clipped_N.dtype == torch.bool and not result.clipped_N.any()

    def test_nothing_is_clipped_before_the_first_update(self) -> None:
        values = torch.linspace(-3, 3, 20)
        assert not value_loss(values, values.clone(), torch.randn(20), 0.1).clipped_N.any()

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_step_moves_the_value_towards_the_return(self, advantage: float) -> None:
        values = torch.tensor([0.5], requires_grad=True)
        value_loss(values, values.detach(), torch.tensor([0.5 + advantage]), 0.2).loss_N.sum().backward()
        assert values.grad is not None and values.grad.item() == -advantage

    @pytest.mark.parametrize("clip", [0.2, None])
    @settings(max_examples=25)
    @given(
        st.lists(st.booleans(), min_size=1, max_size=12),
        st.sampled_from([NAN, INF, -INF, 1e6]),
        st.integers(0, 2**31),
    )
    def test_absent_slots_change_neither_value_nor_gradient(
        self, clip: float | None, kept: list[bool], poison: float, seed: int
    ) -> None:
        mask = torch.tensor(kept)
        values, old, returns = torch.randn(3, len(kept), generator=torch.Generator().manual_seed(seed))
        leaf = torch.where(mask, values, poison).requires_grad_()
        found = value_loss(leaf, torch.where(mask, old, poison), torch.where(mask, returns, poison), clip, mask)
        (grad,) = torch.autograd.grad(found.loss_N.sum(), leaf)
        packed_leaf = values[mask].requires_grad_()
        packed = value_loss(packed_leaf, old[mask], returns[mask], clip)
        assert torch.equal(found.loss_N[mask], packed.loss_N) and torch.equal(found.clipped_N[mask], packed.clipped_N)
        assert torch.equal(grad[mask], torch.autograd.grad(packed.loss_N.sum(), packed_leaf)[0])
        assert not found.loss_N[~mask].any() and not grad[~mask].any() and not found.clipped_N[~mask].any()

    def test_gradient_goes_to_the_values_alone(self) -> None:
        values, old, returns = (torch.tensor([float(i)], requires_grad=True) for i in range(3))
        result = value_loss(values, old, returns, 0.2)
        result.loss_N.sum().backward()
        assert old.grad is None and returns.grad is None and not result.clipped_N.requires_grad

    @pytest.mark.parametrize("clip", [0.2, None])
    def test_bfloat16_values_are_computed_with_in_float32(self, clip: float | None) -> None:
        # (1 + 1/128)^2 / 2 needs more digits than bfloat16 has.
        values = torch.tensor([1.0078125])
        exact = value_loss(values, values, torch.zeros(1), clip)
        found = value_loss(values.bfloat16(), values.bfloat16(), torch.zeros(1).bfloat16(), clip)
        assert found.loss_N.dtype == torch.float32 and torch.equal(found.loss_N, exact.loss_N)

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_loss_is_float32_whatever_comes_in(self, odd: int) -> None:
        arrays = [torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([0.0])]
        arrays[odd] = arrays[odd].double()
        for clip in (0.2, None):
            assert value_loss(*arrays, clip).loss_N.dtype == torch.float32

    def test_arrays_of_different_shapes_are_an_error(self) -> None:
        one, two = torch.zeros(1), torch.zeros(2)
        for arrays in ((one, two, two), (two, one, two), (two, two, one)):
            with pytest.raises(ValueError, match="have to have one shape"):
                value_loss(*arrays, 0.2)


class TestExplainedVariance:
    def test_from_sums(self) -> None:
        # R = 1, 3: n 2, sum 4, squares 10, variance 5 - 4 = 1. V = 1, 2: errors 0, 1: sum 1, squares 1, variance
        # 0.5 - 0.25 = 0.25: 1 - 0.25 = 0.75
        assert explained_variance(2, 4.0, 10.0, 1.0, 1.0) == 0.75

    def test_exact_values_explain_everything(self) -> None:
        assert explained_variance(2, 4.0, 10.0, 0.0, 0.0) == 1.0

    def test_constant_values_explain_nothing(self) -> None:
        # V = 5: errors -4, -2: sum -6, squares 20, variance 10 - 9 = 1
        assert explained_variance(2, 4.0, 10.0, -6.0, 20.0) == 0.0

    def test_wrong_values_are_worse_than_none(self) -> None:
        # V = 3, 1: errors -2, 2: variance 4: 1 - 4 = -3
        assert explained_variance(2, 4.0, 10.0, 0.0, 8.0) == -3.0

    def test_absent_without_tokens_and_for_equal_returns(self) -> None:
        assert explained_variance(0, 0.0, 0.0, 0.0, 0.0) is None
        assert explained_variance(4, 0.0, 0.0, 1.0, 1.0) is None
        # Three times 0.3: E[R^2] - E[R]^2 is 1.4e-17, which is rounding.
        assert explained_variance(3, sum([0.3] * 3), sum([0.3 * 0.3] * 3), 0.0, 0.5) is None

    def test_small_spread_around_a_large_mean_is_no_rounding(self) -> None:
        # R = 100 - 0.01 and 100 + 0.01: variance 1e-4, a share of 1e-8 of E[R^2]. Errors of variance 1e-4 / 2.
        found = explained_variance(2, 200.0, 99.99**2 + 100.01**2, 0.0, 1e-4)
        assert found == pytest.approx(0.5, abs=1e-4)
        # The same 5000 times over: what counts as rounding is a share of the mean, not of the sum.
        many = explained_variance(10_000, 1e6, 5000 * (99.99**2 + 100.01**2), 0.0, 0.5)
        assert many == pytest.approx(0.5, abs=1e-4)

    @pytest.mark.parametrize("unit", [1e-8, 1e8])
    def test_unit_of_the_reward_does_not_matter(self, unit: float) -> None:
        # The numbers of the first test in another unit: squares 10 u^2 and 1 u^2.
        assert explained_variance(2, 4 * unit, 10 * unit**2, unit, unit**2) == pytest.approx(0.75)

    @given(st.integers(2, 30), st.integers(0, 2**31))
    def test_equals_numpy_and_adds_up_over_ranks(self, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        returns, values = generator.normal(size=(2, count))
        errors = returns - values
        cut = count // 2
        sums = [
            [len(r), r.sum(), (r * r).sum(), e.sum(), (e * e).sum()]
            for r, e in ((returns[:cut], errors[:cut]), (returns[cut:], errors[cut:]))
        ]
        expected = 1 - errors.var() / returns.var()
        assert explained_variance(*np.sum(sums, axis=0)) == pytest.approx(expected, rel=1e-6, abs=1e-6)
