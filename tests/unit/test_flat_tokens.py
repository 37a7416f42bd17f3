"""What the formulas share: finite log-probs and ratios, absent slots, and sums over each response."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.algorithms.tokens import finite_logprobs, present, ratio_of, sequence_mean, sequence_sum

NAN, INF = float("nan"), math.inf


def test_absent_slots_are_emptied() -> None:
    values = torch.tensor([1.0, NAN, INF])
    assert present(values, torch.tensor([True, False, False])).tolist() == [1.0, 0.0, 0.0]
    assert present(values, None) is values


def test_log_probs_are_bounded_float32_numbers() -> None:
    found = finite_logprobs(torch.tensor([-INF, -3.0, INF], dtype=torch.bfloat16))
    assert found.tolist() == [-1e4, -3.0, 1e4] and found.dtype == torch.float32


def test_ratio_is_bounded_on_both_sides_and_has_no_gradient_beyond() -> None:
    log_ratios = torch.tensor([-30.0, 0.5, 30.0], requires_grad=True)
    ratios = ratio_of(log_ratios)
    expected = torch.tensor([math.exp(-20), math.exp(0.5), math.exp(20)])
    torch.testing.assert_close(ratios.detach(), expected, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(ratios.sum(), log_ratios)
    torch.testing.assert_close(gradient, torch.tensor([0.0, math.exp(0.5), 0.0]), rtol=1e-5, atol=0)


class TestPerSequence:
    # Samples 1 (values 1, 2, and an absent slot), 0 (5) and 2 (nothing but an absent slot).
    VALUES = torch.tensor([1.0, NAN, 2.0, 5.0, INF])
    ROWS = torch.tensor([1, -9, 1, 0, 2])
    MASK = torch.tensor([True, False, True, True, False])

    def test_sum_is_put_back_on_each_token(self) -> None:
        assert sequence_sum(self.VALUES, self.ROWS, 3, self.MASK).tolist() == [3.0, 0.0, 3.0, 5.0, 0.0]

    def test_mean_counts_present_tokens_only(self) -> None:
        assert sequence_mean(self.VALUES, self.ROWS, 3, self.MASK).tolist() == [1.5, 0.0, 1.5, 5.0, 0.0]

    def test_without_mask_every_token_counts(self) -> None:
        values, rows = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 1, 1])
        assert sequence_sum(values, rows, 2).tolist() == [1.0, 8.0, 8.0]
        assert sequence_mean(values, rows, 2).tolist() == [1.0, 4.0, 4.0]

    @pytest.mark.parametrize("function", [sequence_sum, sequence_mean])
    def test_bfloat16_is_summed_in_float32(self, function: object) -> None:
        # 256 + 1 is no number of bfloat16.
        found = function(torch.tensor([256.0, 1.0], dtype=torch.bfloat16), torch.tensor([0, 0]), 1)  # type: ignore[operator]
        assert found.dtype == torch.float32 and found[0].item() in (257.0, 128.5)

    def test_sum_is_on_the_device_of_the_values(self) -> None:
        values = torch.zeros(3, device="meta")
        assert sequence_sum(values, torch.zeros(3, dtype=torch.int64, device="meta"), 1).device.type == "meta"

    def test_gradient_of_a_mean_is_shared_by_its_tokens(self) -> None:
        values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
        mean = sequence_mean(values, torch.tensor([0, 1, 1]), 2)
        # The first and second entries: 1 for the only token of sample 0, 1/2 for both of sample 1.
        assert torch.autograd.grad(mean[:2].sum(), values)[0].tolist() == [1.0, 0.5, 0.5]
