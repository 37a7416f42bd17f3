"""What holds for every policy loss by its name: layout, absent slots, first pass, gradients and numerics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.aggregation import Aggregation, Totals, token_weight
from rlhf.algorithms.losses import LossTokens, PolicyLoss, policy_loss, weighted_sum
from rlhf.config.catalogue import LOSSES
from rlhf.config.schema import AlgorithmConfig
from tests.unit.loss_tokens import algorithm, gradient, rows_of, single

NAN, INF = float("nan"), math.inf
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_mean_token_mean", "constant")


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], Tensor]:
    """Response lengths, and for all tokens [4, N]: log-probs, old log-probs, advantages, correction weights."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(4, sum(lengths), generator=generator) * torch.tensor([0.4, 0.4, 1.0, 1.0])[:, None]
    return lengths, values + torch.tensor([-1.5, -1.5, 0.0, 0.0])[:, None]


def step_loss(
    config: AlgorithmConfig, aggregation: Aggregation, lengths: Sequence[int], values: Tensor, parts: list[list[int]]
) -> tuple[float, Tensor]:
    """Loss of one optimizer step and its gradient, with the samples laid out in these micro-batches."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    leaf = values[0].clone().requires_grad_()
    totals = Totals.of(lengths, 8)
    total = 0.0
    for part in parts:
        index = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in part])
        rows = rows_of([lengths[i] for i in part])
        tokens = LossTokens(leaf[index], values[1][index], values[2][index], rows, len(part), values[3][index])
        weights = torch.tensor([token_weight(aggregation, lengths[i], totals) for i in part])[rows]
        loss = weighted_sum(policy_loss(tokens, config).loss_N, weights)
        loss.backward()
        total += loss.item()
    assert leaf.grad is not None
    return total, leaf.grad


@pytest.mark.parametrize("name", sorted(LOSSES))
class TestEveryLoss:
    @settings(max_examples=15)
    @given(batches(), st.sampled_from(AGGREGATIONS), st.randoms())
    def test_step_does_not_depend_on_micro_batches_and_order(
        self, name: str, batch: tuple[list[int], Tensor], aggregation: Aggregation, random: Any
    ) -> None:
        lengths, values = batch
        order = list(range(len(lengths)))
        loss, grad = step_loss(algorithm(name), aggregation, lengths, values, [order])
        random.shuffle(order)
        cut = random.randint(0, len(order))
        for parts in ([order], [[i] for i in order], [part for part in (order[:cut], order[cut:]) if part]):
            other_loss, other_grad = step_loss(algorithm(name), aggregation, lengths, values, parts)
            assert other_loss == pytest.approx(loss, abs=1e-6, rel=1e-6)
            torch.testing.assert_close(other_grad, grad, atol=1e-6, rtol=1e-6)

    def test_token_mean_of_one_and_three_tokens_is_the_same_in_both_layouts(self, name: str) -> None:
        # Two responses of 1 and 3 tokens, advantages +1 and -1, on the first pass. Gradient of token_mean:
        # -1/4 for the token of the first, +1/4 for each of the second; sequence_mean_token_mean: -1/2 and 1/6.
        values = torch.stack([torch.full((4,), -1.0)] * 2 + [torch.tensor([1.0, -1.0, -1.0, -1.0]), torch.ones(4)])
        expected = {"token_mean": [-1 / 4] + [1 / 4] * 3, "sequence_mean_token_mean": [-1 / 2] + [1 / 6] * 3}
        for aggregation in ("token_mean", "sequence_mean_token_mean"):
            for parts in ([[0, 1]], [[0], [1]]):
                _, grad = step_loss(algorithm(name), aggregation, [1, 3], values, parts)
                torch.testing.assert_close(grad, torch.tensor(expected[aggregation]))

    @settings(max_examples=15)
    @given(batches(), st.sampled_from([NAN, INF, -INF, 1e6]), st.data())
    def test_absent_slots_change_neither_value_nor_gradient(
        self, name: str, batch: tuple[list[int], Tensor], poison: float, data: st.DataObject
    ) -> None:
        lengths, values = batch
        count = sum(lengths)
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))

        def run(values: Tensor, rows: Tensor) -> tuple[PolicyLoss, Tensor]:
            leaf = values[0].clone().requires_grad_()
            tokens = LossTokens(leaf, values[1], values[2], rows, len(lengths), values[3], mask)
            result = policy_loss(tokens, algorithm(name))
            return result, torch.autograd.grad(weighted_sum(result.loss_N, values[3], mask), leaf)[0]

        rows = rows_of(lengths)
        clean, grad = run(values, rows)
        other, other_grad = run(torch.where(mask, values, poison), torch.where(mask, rows, -7))
        assert torch.equal(other.loss_N, clean.loss_N) and torch.equal(other_grad, grad)
        assert torch.equal(other.ratio_N, clean.ratio_N) and torch.equal(other.clipped_N, clean.clipped_N)
        assert not grad[~mask].any() and not other.loss_N[~mask].any() and not other.clipped_N[~mask].any()

    def test_slots_left_out_by_the_mask_equal_slots_that_never_were(self, name: str) -> None:
        logprobs, old = torch.tensor([-1.0, -0.3, -2.0]), torch.tensor([-1.1, -0.9, -1.7])
        advantages, mask = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([True, False, True])
        rows = torch.tensor([0, 0, 1])
        padded = policy_loss(LossTokens(logprobs, old, advantages, rows, 2, None, mask), algorithm(name))
        packed = policy_loss(LossTokens(logprobs[mask], old[mask], advantages[mask], rows[mask], 2), algorithm(name))
        assert torch.equal(padded.loss_N[mask], packed.loss_N)

    def test_ratio_is_exactly_one_on_the_first_pass_and_nothing_is_clipped(self, name: str) -> None:
        logprobs = -torch.rand(64, generator=torch.Generator().manual_seed(1)) * 30
        tokens = LossTokens(logprobs, logprobs.clone(), torch.linspace(-2, 2, 64), rows_of([30, 34]), 2)
        result = policy_loss(tokens, algorithm(name))
        assert (result.ratio_N == 1).all() and not result.clipped_N.any()

    @pytest.mark.parametrize("advantage", [1.5, -1.5])
    def test_first_gradient_is_the_policy_gradient_of_a_two_token_softmax(self, name: str, advantage: float) -> None:
        # log pi(0) of softmax(z) has the gradient (1 - p0, -p1) = (p1, -p1), so the loss has -A (p1, -p1).
        # z = (ln 3, 0): p1 = 0.25.
        logits = torch.tensor([math.log(3.0), 0.0], requires_grad=True)
        logprobs = torch.log_softmax(logits, -1)[:1]
        tokens = LossTokens(logprobs, logprobs.detach(), torch.tensor([advantage]), rows_of([1]), 1)
        (found,) = torch.autograd.grad(policy_loss(tokens, algorithm(name)).loss_N.sum(), logits)
        torch.testing.assert_close(found, torch.tensor([-0.25 * advantage, 0.25 * advantage]))

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_step_makes_a_good_token_likelier_and_a_bad_one_less_likely(self, name: str, advantage: float) -> None:
        logits = torch.zeros(5, requires_grad=True)
        old = torch.log_softmax(logits.detach(), -1)[:1]
        # A ratio a little off 1 on the side that no clip touches.
        old = old + 0.05 * advantage
        tokens = LossTokens(torch.log_softmax(logits, -1)[:1], old, torch.tensor([advantage]), rows_of([1]), 1)
        (found,) = torch.autograd.grad(policy_loss(tokens, algorithm(name)).loss_N.sum(), logits)
        after = torch.log_softmax(logits.detach() - 0.1 * found, -1)[0]
        assert math.copysign(1, after.item() - math.log(0.2)) == advantage

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize(
        ("logprob", "old"),
        [
            (0.0, 0.0),
            (0.0, -0.5),
            (-0.5, 0.0),
            (0.0, -20.0),
            (-20.0, 0.0),
            (0.0, -100.0),
            (-100.0, 0.0),
            (0.0, -INF),
            (-INF, 0.0),
            (-INF, -INF),
        ],
    )
    def test_value_gradient_and_step_are_finite(
        self, name: str, dtype: torch.dtype, advantage: float, logprob: float, old: float
    ) -> None:
        leaf = torch.tensor([logprob, -1.0], dtype=dtype, requires_grad=True)
        other = torch.tensor([old, -1.0], dtype=dtype)
        tokens = LossTokens(leaf, other, torch.full((2,), advantage, dtype=dtype), rows_of([2]), 1)
        result = policy_loss(tokens, algorithm(name))
        (grad,) = torch.autograd.grad(result.loss_N.sum(), leaf)
        # Squares too, since the optimizer keeps them.
        assert torch.isfinite(result.loss_N).all() and torch.isfinite(grad.float().square()).all()
        assert torch.isfinite(result.ratio_N).all()

    def test_bfloat16_log_probs_are_computed_with_in_float32(self, name: str) -> None:
        # Both are numbers of bfloat16, their difference 0.0546875 too; the ratio e^0.0546875 is none.
        logprobs, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0546875, -0.9453125])
        advantages, rows = torch.tensor([1.0, -1.0]), rows_of([2])
        small = [values.to(torch.bfloat16) for values in (logprobs, old, advantages)]
        assert torch.equal(small[1].float(), old)
        exact = policy_loss(LossTokens(logprobs, old, advantages, rows, 1), algorithm(name))
        result = policy_loss(LossTokens(*small, rows, 1), algorithm(name))
        assert result.loss_N.dtype == result.ratio_N.dtype == torch.float32
        assert torch.equal(result.loss_N, exact.loss_N) and torch.equal(result.ratio_N, exact.ratio_N)

    def test_nan_of_a_token_that_counts_is_not_hidden(self, name: str) -> None:
        tokens = LossTokens(torch.tensor([NAN, -1.0]), torch.zeros(2), torch.ones(2), torch.arange(2), 2)
        assert policy_loss(tokens, algorithm(name)).loss_N.isnan().tolist() == [True, False]

    def test_gradient_goes_to_the_current_log_probs_alone(self, name: str) -> None:
        leaves = [torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(4)]
        logprobs, old, advantages, weights = leaves
        result = policy_loss(LossTokens(logprobs, old, advantages, rows_of([2]), 1, weights), algorithm(name))
        result.loss_N.sum().backward()
        assert logprobs.grad is not None and logprobs.grad.any()
        assert old.grad is None and advantages.grad is None and weights.grad is None
        assert not result.ratio_N.requires_grad and not result.clipped_N.requires_grad

    def test_correction_weights_scale_loss_and_gradient(self, name: str) -> None:
        plain, weighted = (single([1.1, 0.9], [1.0, -1.0]) for _ in range(2))
        weights = torch.tensor([0.5, 0.0])
        weighted = replace(weighted, weights_N=weights)
        config = algorithm(name)
        assert torch.equal(policy_loss(weighted, config).loss_N, policy_loss(plain, config).loss_N * weights)
        assert torch.equal(gradient(weighted, config), gradient(plain, config) * weights)

    def test_zero_advantage_has_no_loss_and_no_gradient(self, name: str) -> None:
        tokens = single([0.3, 1.0, 1.6], [0.0, 0.0, 0.0])
        assert not policy_loss(tokens, algorithm(name)).loss_N.any()
        assert not gradient(tokens, algorithm(name)).any()

    def test_no_tokens_give_an_empty_loss_that_can_be_differentiated(self, name: str) -> None:
        leaf = torch.zeros(0, requires_grad=True)
        rows = torch.zeros(0, dtype=torch.int64)
        result = policy_loss(LossTokens(leaf, torch.zeros(0), torch.zeros(0), rows, 0), algorithm(name))
        total = weighted_sum(result.loss_N, torch.zeros(0))
        assert total.item() == 0.0 and torch.autograd.grad(total, leaf)[0].shape == (0,)

    def test_settings_that_the_catalogue_names_matter_and_no_others(self, name: str) -> None:
        other = {
            "clip.low": 0.05,
            "clip.high": 0.05,
            "clip.dual": 1.5,
            "sapo.positive": 3.0,
            "sapo.negative": 3.0,
            "dppo.threshold": 0.3,
            "dppo.divergence": "kl",
        }
        assert LOSSES[name].settings <= set(other)
        probabilities = torch.linspace(0.05, 0.95, 10).log()
        logprobs, old = torch.cartesian_prod(probabilities, probabilities).T
        count = len(logprobs)

        def losses(config: AlgorithmConfig) -> Tensor:
            both = [torch.cat([values, values]) for values in (logprobs, old)]
            advantages = torch.cat([torch.ones(count), -torch.ones(count)])
            return policy_loss(LossTokens(*both, advantages, torch.arange(2 * count), 2 * count), config).loss_N

        plain = losses(algorithm(name))
        for setting, value in other.items():
            section, key = setting.split(".")
            changed = not torch.equal(losses(algorithm(name, **{section: {key: value}})), plain)
            assert changed == (setting in LOSSES[name].settings), setting
