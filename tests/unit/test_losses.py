"""Policy losses: each formula, and the skeleton around them, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.aggregation import Totals, token_weight
from rlhf.algorithms.losses import (
    SURROGATES,
    LossTokens,
    SurrogateInput,
    binary_divergence,
    policy_loss,
    weighted_sum,
)
from rlhf.config.catalogue import LOSSES
from rlhf.config.schema import AlgorithmConfig
from tests.unit.loss_tokens import algorithm, gradient, rows_of, single

NAN, INF = float("nan"), math.inf


class TestPPO:
    def test_values_inside_and_outside_the_clip_range(self) -> None:
        # Ratios 1.5, 1.5, 0.5, 0.5 with clip [0.8, 1.2]:
        # A=+1: -min(1.5, 1.2) = -1.2 clipped; A=-1: max(1.5, 1.2) = 1.5; A=+1: -0.5; A=-1: max(0.5, 0.8) = 0.8 clipped
        result = policy_loss(single([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0]), algorithm("ppo"))
        torch.testing.assert_close(result.loss_N, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
        assert result.clipped_N.tolist() == [True, False, False, True]
        torch.testing.assert_close(result.ratio_N, torch.tensor([1.5, 1.5, 0.5, 0.5]))

    def test_clipped_tokens_have_no_gradient_and_others_minus_advantage_times_ratio(self) -> None:
        # A=1 r=1.5 clipped: 0; A=-1 r=1.5: 1 * 1.5; A=2 r=0.9: -2 * 0.9
        found = gradient(single([1.5, 1.5, 0.9], [1.0, -1.0, 2.0]), algorithm("ppo"))
        torch.testing.assert_close(found, torch.tensor([0.0, 1.5, -1.8]))

    def test_asymmetric_clip(self) -> None:
        # [1 - 0.4, 1 + 0.28] = [0.6, 1.28] holds 1.25 and 0.7; 1.3 and 0.5 are cut to 1.28 and 0.6.
        tokens = single([1.25, 0.7, 1.3, 0.5], [1.0, -1.0, 1.0, -1.0])
        result = policy_loss(tokens, algorithm("ppo", clip={"low": 0.4, "high": 0.28}))
        torch.testing.assert_close(result.loss_N, torch.tensor([-1.25, 0.7, -1.28, 0.6]))
        assert result.clipped_N.tolist() == [False, False, True, True]

    def test_dual_clip_bounds_the_loss_of_a_bad_token_at_a_multiple_of_its_advantage(self) -> None:
        # dual 3. A=-2, r=5: 2 * 5 = 10 > 3 * 2 = 6: 6, no gradient. A=-2, r=2.5: 5 stays, gradient 5.
        # A=+2, r=5: clipped at 1.2 as ever: -2.4. A=-2, r=0.5: clipped at 0.8: 1.6.
        config = algorithm("ppo", clip={"dual": 3.0})
        tokens = single([5.0, 2.5, 5.0, 0.5], [-2.0, -2.0, 2.0, -2.0])
        result = policy_loss(tokens, config)
        torch.testing.assert_close(result.loss_N, torch.tensor([6.0, 5.0, -2.4, 1.6]))
        assert result.clipped_N.tolist() == [True, False, True, True]
        torch.testing.assert_close(gradient(tokens, config), torch.tensor([0.0, 5.0, 0.0, 0.0]))


class TestGSPO:
    def test_ratio_is_the_geometric_mean_over_the_response(self) -> None:
        # Log-ratios 0.3 and -0.1: s = exp(0.1) = 1.10517, inside [0.8, 1.2]. A = 2: -2.21034 on both tokens.
        # Second response, log-ratio 0.5: s = 1.64872, cut to 1.2: A = 1: -1.2, no gradient.
        logprobs = torch.tensor([0.3, -0.1, 0.5], requires_grad=True)
        tokens = LossTokens(logprobs, torch.zeros(3), torch.tensor([2.0, 2.0, 1.0]), rows_of([2, 1]), 2)
        result = policy_loss(tokens, algorithm("gspo"))
        torch.testing.assert_close(result.loss_N, torch.tensor([-2.21034, -2.21034, -1.2]))
        assert result.clipped_N.tolist() == [False, False, True]
        # The reported ratio is that of the token: e^0.3, e^-0.1, e^0.5.
        torch.testing.assert_close(result.ratio_N, torch.tensor([1.34986, 0.90484, 1.64872]))

    def test_each_token_gets_its_share_of_the_response_gradient(self) -> None:
        # Mean over the two tokens: loss -A s, d s / d logprob = s / 2: -2 * 1.10517 / 2 = -1.10517 each.
        logprobs = torch.tensor([0.3, -0.1], requires_grad=True)
        tokens = LossTokens(logprobs, torch.zeros(2), torch.full((2,), 2.0), rows_of([2]), 1)
        loss = weighted_sum(policy_loss(tokens, algorithm("gspo")).loss_N, torch.full((2,), 0.5))
        torch.testing.assert_close(loss.detach(), torch.tensor(-2.21034))
        torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], torch.full((2,), -1.10517))

    def test_one_far_token_counts_in_full_in_the_mean(self) -> None:
        # Log-ratios -100 and 0 over 100 tokens: mean -1, s = 0.36788. Bounding each token at -20 first would give
        # e^-0.2 = 0.81873, inside the clip range.
        logprobs = torch.zeros(100)
        logprobs[7] = -100.0
        tokens = LossTokens(logprobs, torch.zeros(100), torch.ones(100), rows_of([100]), 1)
        torch.testing.assert_close(policy_loss(tokens, algorithm("gspo")).loss_N, torch.full((100,), -0.36788))

    def test_padding_stays_out_of_a_sequence_level_mean(self) -> None:
        # Mask 1 1 0 0, advantages 1 1 10 10, ratio 1: (-1 - 1) / 2 = -1, and -5.5 if padding counted.
        mask = torch.tensor([True, True, False, False])
        zeros = torch.zeros(4)
        advantages = torch.tensor([1.0, 1.0, 10.0, 10.0])
        loss = policy_loss(LossTokens(zeros, zeros, advantages, rows_of([4]), 1, mask_N=mask), algorithm("gspo")).loss_N
        weight = token_weight("sequence_mean_token_mean", 2, Totals.of([2], 4))
        assert weighted_sum(loss, torch.full((4,), weight), mask).item() == -1.0

    def test_padding_does_not_dilute_the_ratio(self) -> None:
        # One token of log-ratio 0.1 and an absent one: s = e^0.1 = 1.10517, not e^0.05.
        mask = torch.tensor([True, False])
        tokens = LossTokens(torch.tensor([0.1, 0.0]), torch.zeros(2), torch.ones(2), rows_of([2]), 1, mask_N=mask)
        torch.testing.assert_close(policy_loss(tokens, algorithm("gspo")).loss_N, torch.tensor([-1.10517, 0.0]))


class TestCISPO:
    def test_cut_weight_times_log_prob(self) -> None:
        # high 0.2. r = 0.5: -0.5 * 1 * ln 0.5 = 0.34657; r = 2 cut to 1.2: -1.2 * -3 * ln 2 = 2.49533
        result = policy_loss(single([0.5, 2.0], [1.0, -3.0]), algorithm("cispo"))
        torch.testing.assert_close(result.loss_N, torch.tensor([0.34657, 2.49533]))
        assert result.clipped_N.tolist() == [False, True]

    def test_weight_at_the_bound_is_not_cut(self) -> None:
        # high 0: the bound is 1, and so is the ratio of the first pass.
        result = policy_loss(single([1.0, 1.5], [1.0, 1.0]), algorithm("cispo", clip={"high": 0.0}))
        assert result.clipped_N.tolist() == [False, True]

    def test_token_with_a_cut_weight_keeps_its_gradient(self) -> None:
        # -min(r, 1.2) * A: r = 0.5: -0.5; r = 2, A = -3: 3.6; r = 2, A = 1: -1.2. The ratio itself has no gradient.
        found = gradient(single([0.5, 2.0, 2.0], [1.0, -3.0, 1.0]), algorithm("cispo"))
        torch.testing.assert_close(found, torch.tensor([-0.5, 3.6, -1.2]))


class TestSAPO:
    CONFIG = algorithm("sapo", sapo={"positive": 1.0, "negative": 2.0})

    def test_gate_by_the_sign_of_the_advantage(self) -> None:
        # r = 2. A = 1, tau 1: sigmoid(1) * 4 = 0.731059 * 4 = 2.92423. A = -1, tau 2: sigmoid(2) * 2 = 0.880797 * 2
        # r = 1: sigmoid(0) * 4 / tau = 2 / tau.
        result = policy_loss(single([2.0, 2.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0]), self.CONFIG)
        torch.testing.assert_close(result.loss_N, torch.tensor([-2.92423, 1.76159, -2.0, 1.0]))
        assert not result.clipped_N.any()

    def test_gradient_fades_with_the_gate(self) -> None:
        # f'(r) r = 4 sigmoid (1 - sigmoid) r at r = 2: 4 * 0.196612 * 2 = 1.57290; tau 2: 4 * 0.104994 * 2 = 0.83995
        found = gradient(single([2.0, 2.0], [1.0, -1.0]), self.CONFIG)
        torch.testing.assert_close(found, torch.tensor([-1.57290, 0.83995]))


class TestReinforce:
    def test_minus_advantage_times_log_prob(self) -> None:
        # -2 * ln 0.5 = 1.38629; -(-1) * ln 0.25 = -1.38629; gradients -2 and 1.
        tokens = single([0.5, 0.25], [2.0, -1.0])
        torch.testing.assert_close(
            policy_loss(tokens, algorithm("reinforce")).loss_N, torch.tensor([1.38629, -1.38629])
        )
        assert gradient(tokens, algorithm("reinforce")).tolist() == [-2.0, 1.0]

    def test_old_log_probs_are_not_read_and_the_ratio_is_one(self) -> None:
        tokens = replace(single([0.5], [2.0]), old_logprobs_N=torch.tensor([NAN]))
        result = policy_loss(tokens, algorithm("reinforce"))
        torch.testing.assert_close(result.loss_N, torch.tensor([1.38629]))
        assert result.ratio_N.item() == 1.0


class TestDPPO:
    def tokens(self, pairs: Sequence[tuple[float, float]], advantages: Sequence[float]) -> LossTokens:
        """Single-token responses with (old, current) probabilities."""
        old, new = torch.tensor(pairs).log().T
        count = len(pairs)
        leaf = new.clone().requires_grad_()
        return LossTokens(leaf, old, torch.tensor(advantages), torch.arange(count), count)

    def test_token_that_moves_further_away_is_left_out(self) -> None:
        # Total variation, threshold 0.15. 0.5 -> 0.7 moves by 0.2: A > 0 left out, A < 0 kept: 1.4.
        # 0.5 -> 0.3: A < 0 left out, A > 0 kept: -0.6. 0.5 -> 0.6 moves by 0.1: kept, -1.2.
        pairs = [(0.5, 0.7), (0.5, 0.7), (0.5, 0.3), (0.5, 0.3), (0.5, 0.6)]
        tokens = self.tokens(pairs, [1.0, -1.0, -1.0, 1.0, 1.0])
        result = policy_loss(tokens, algorithm("dppo"))
        torch.testing.assert_close(result.loss_N, torch.tensor([0.0, 1.4, 0.0, -0.6, -1.2]))
        assert result.clipped_N.tolist() == [True, False, True, False, False]
        # d(-r A) / d logprob = -r A, and 0 for what is left out.
        torch.testing.assert_close(gradient(tokens, algorithm("dppo")), torch.tensor([0.0, 1.4, 0.0, -0.6, -1.2]))

    def test_large_ratio_of_a_rare_token_is_inside_the_trust_region(self) -> None:
        # 0.001 -> 0.01: the ratio is 10, the probability moved by 0.009.
        result = policy_loss(self.tokens([(0.001, 0.01)], [1.0]), algorithm("dppo"))
        assert not result.clipped_N.any()
        torch.testing.assert_close(result.loss_N, torch.tensor([-10.0]))

    def test_token_at_the_threshold_stays(self) -> None:
        # Log-prob 0 to ln 0.5: moved by 1 - 0.5 = 0.5. Ratio 0.5, A = -1: 0.5
        config = algorithm("dppo", dppo={"threshold": 0.5})
        result = policy_loss(self.tokens([(1.0, 0.5)], [-1.0]), config)
        assert result.loss_N.tolist() == [0.5] and not result.clipped_N.any()

    def test_binary_divergences(self) -> None:
        # 0.5 -> 0.25: tv 0.25; kl 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.346574 - 0.202733 = 0.143841
        # 0.25 -> 0.5: tv 0.25; kl 0.25 ln 0.5 + 0.75 ln 1.5 = -0.173287 + 0.304099 = 0.130812
        old, new = torch.tensor([[0.5, 0.25], [0.25, 0.5]]).log()
        torch.testing.assert_close(binary_divergence(old, new, "tv"), torch.tensor([0.25, 0.25]))
        torch.testing.assert_close(binary_divergence(old, new, "kl"), torch.tensor([0.143841, 0.130812]))

    def test_kl_threshold_lies_between_the_two_directions(self) -> None:
        # Threshold 0.137: 0.143841 is left out (A < 0, falls), 0.130812 stays (A > 0, rises): -1 * 2.
        config = algorithm("dppo", dppo={"divergence": "kl", "threshold": 0.137})
        result = policy_loss(self.tokens([(0.5, 0.25), (0.25, 0.5)], [-1.0, 1.0]), config)
        assert result.clipped_N.tolist() == [True, False]
        torch.testing.assert_close(result.loss_N, torch.tensor([0.0, -2.0]))

    @pytest.mark.parametrize("divergence", ["tv", "kl"])
    def test_divergence_is_zero_between_equals_and_finite_at_the_ends(self, divergence: str) -> None:
        ends = torch.tensor([0.0, -1e-9, -0.5, -100.0, -INF])
        assert binary_divergence(ends, ends, divergence).tolist() == [0.0] * 5
        old, new = torch.cartesian_prod(ends, ends).T
        divergences = binary_divergence(old, new, divergence)
        assert torch.isfinite(divergences).all() and (divergences >= 0).all()

    @pytest.mark.parametrize("divergence", ["tv", "kl"])
    def test_divergence_of_bfloat16_is_computed_with_in_float32(self, divergence: str) -> None:
        old, new = torch.tensor([[-1.0, -0.0546875], [-1.0546875, -2.0]])
        found = binary_divergence(old.bfloat16(), new.bfloat16(), divergence)
        assert found.dtype == torch.float32 and torch.equal(found, binary_divergence(old, new, divergence))

    def test_unknown_divergence_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="use tv or kl"):
            binary_divergence(torch.zeros(1), torch.zeros(1), "js")


@pytest.mark.parametrize("name", ["ppo", "gspo", "dppo"])
def test_token_without_an_advantage_is_never_clipped(name: str) -> None:
    tokens = LossTokens(torch.tensor([-0.1, -3.0]), torch.tensor([-3.0, -0.1]), torch.zeros(2), torch.arange(2), 2)
    assert not policy_loss(tokens, algorithm(name, clip={"dual": 3.0})).clipped_N.any()


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_token_that_neither_policy_can_sample_has_ratio_one(name: str) -> None:
    # Log-probs -inf and -inf: the ratio is that of equals, not e^20.
    tokens = LossTokens(torch.tensor([-INF]), torch.tensor([-INF]), torch.ones(1), torch.arange(1), 1)
    assert policy_loss(tokens, algorithm(name)).ratio_N.tolist() == [1.0]


def test_every_loss_of_the_catalogue_has_its_formula() -> None:
    assert set(SURROGATES) == set(LOSSES)


class TestOwnSurrogate:
    def half_square(self, inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        mean = inputs.sequence_mean(inputs.log_ratio_N)
        return mean.square() / 2 + config.options["shift"], inputs.log_ratio_N > 0.15

    def test_formula_of_ones_own_runs_in_the_same_skeleton(self) -> None:
        # Log-ratios 0.1, 0.3 | 9 (absent): mean 0.2 on both, 0.02 + 1 = 1.02, times weights 1 and 2; the absent slot
        # has loss 0 although the formula gives it 1.
        tokens = LossTokens(
            torch.tensor([-0.9, -0.7, 8.0]),
            torch.full((3,), -1.0),
            torch.ones(3),
            rows_of([3]),
            1,
            torch.tensor([1.0, 2.0, 5.0]),
            torch.tensor([True, True, False]),
        )
        config = AlgorithmConfig(loss="mine:half_square", options={"shift": 1.0})
        result = policy_loss(tokens, config, self.half_square)
        torch.testing.assert_close(result.loss_N, torch.tensor([1.02, 2.04, 0.0]))
        assert result.clipped_N.tolist() == [False, True, False]

    def test_absent_slots_have_neither_loss_nor_clip_whatever_the_formula_gives_them(self) -> None:
        def one(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            return inputs.ratio_N * 0 + 1, inputs.ratio_N > 0

        tokens = replace(single([1.0, 1.0], [1.0, 1.0]), mask_N=torch.tensor([True, False]))
        result = policy_loss(tokens, algorithm("ppo"), one)
        assert result.loss_N.tolist() == [1.0, 0.0] and result.clipped_N.tolist() == [True, False]

    def test_formula_that_mixes_tokens_sees_no_absent_one(self) -> None:
        seen: list[SurrogateInput] = []

        def mixed(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            seen.append(inputs)
            return inputs.logprobs_N.sum().expand(2), inputs.ratio_N > 2

        leaf = torch.tensor([-1.0, NAN], requires_grad=True)
        poison, rows = torch.tensor([1.0, NAN]), torch.tensor([1, -7])
        tokens = LossTokens(leaf, poison, poison, rows, 2, poison, torch.tensor([True, False]))
        result = policy_loss(tokens, algorithm("ppo"), mixed)
        assert result.loss_N.tolist() == [-1.0, 0.0] and seen[0].rows_N.tolist() == [1, 0]
        assert seen[0].advantages_N.tolist() == [1.0, 0.0] and seen[0].old_logprobs_N.tolist() == [1.0, 0.0]
        assert seen[0].logprobs_N.tolist() == [-1.0, 0.0]
        assert torch.autograd.grad(result.loss_N.sum(), leaf)[0].tolist() == [1.0, 0.0]

    def test_log_ratio_is_bounded_like_the_ratio(self) -> None:
        seen: list[SurrogateInput] = []

        def look(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            seen.append(inputs)
            return -inputs.ratio_N, inputs.ratio_N > 1

        old = torch.tensor([-101.0, 99.0, -1.5])
        policy_loss(LossTokens(torch.full((3,), -1.0), old, torch.ones(3), rows_of([3]), 1), algorithm("ppo"), look)
        # Differences 100 and -100 count as 20 and -20.
        assert seen[0].log_ratio_N.tolist() == [20.0, -20.0, 0.5]
        torch.testing.assert_close(seen[0].ratio_N, torch.tensor([math.exp(20), math.exp(-20), math.exp(0.5)]))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("name", ["logprobs_N", "old_logprobs_N", "advantages_N", "weights_N"])
    def test_formula_sees_and_gives_float32_whatever_comes_in(self, name: str, dtype: torch.dtype) -> None:
        seen: list[SurrogateInput] = []

        def look(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            seen.append(inputs)
            return -inputs.ratio_N * inputs.advantages_N, inputs.ratio_N > 1

        tokens = replace(single([1.0, 0.5], [1.0, 2.0]), weights_N=torch.ones(2))
        result = policy_loss(replace(tokens, **{name: getattr(tokens, name).to(dtype)}), algorithm("ppo"), look)
        arrays = (seen[0].logprobs_N, seen[0].old_logprobs_N, seen[0].advantages_N, seen[0].ratio_N, result.loss_N)
        assert {values.dtype for values in arrays} == {torch.float32}

    def test_surrogate_goes_before_the_built_in_of_the_same_name(self) -> None:
        def zero(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            return inputs.ratio_N * 0, inputs.ratio_N > 0

        assert policy_loss(single([1.0], [1.0]), algorithm("ppo"), zero).loss_N.tolist() == [0.0]

    def test_name_without_a_formula_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"'mine:loss' is not built in \(ppo, gspo"):
            policy_loss(single([1.0], [1.0]), AlgorithmConfig(loss="mine:loss"))

    def test_result_of_another_shape_or_type_is_an_error(self) -> None:
        def mean(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            return inputs.ratio_N.mean(), inputs.ratio_N > 1

        def mark(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            return inputs.ratio_N, (inputs.ratio_N > 1).any()

        def number(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
            return inputs.ratio_N, inputs.ratio_N

        for surrogate in (mean, mark, number):
            with pytest.raises(ValueError, match="one loss and one bool per token"):
                policy_loss(single([1.0, 1.0], [1.0, 1.0]), algorithm("ppo"), surrogate)


@pytest.mark.parametrize("field", ["old_logprobs_N", "advantages_N", "rows_N", "weights_N", "mask_N"])
def test_arrays_of_different_shapes_are_an_error(field: str) -> None:
    # One value would broadcast over all tokens without a word.
    odd = {"rows_N": torch.zeros(1, dtype=torch.int64), "mask_N": torch.ones(1, dtype=torch.bool)}
    tokens = replace(single([1.0, 1.0], [1.0, 1.0]), **{field: odd.get(field, torch.zeros(1))})
    with pytest.raises(ValueError, match=rf"{field} has shape \(1,\), logprobs_N \(2,\)"):
        policy_loss(tokens, algorithm("ppo"))


class TestWeightedSum:
    def test_sums_weight_times_loss(self) -> None:
        # 0.5 * 2 + 0.25 * -4 + 1 * 3 = 3
        assert weighted_sum(torch.tensor([2.0, -4.0, 3.0]), torch.tensor([0.5, 0.25, 1.0])).item() == 3.0

    @pytest.mark.parametrize("fill", [lambda v: v, lambda v: torch.where(v == 3.0, torch.tensor(NAN), v)])
    def test_absent_slots_do_not_count(self, fill: Callable[[Tensor], Tensor]) -> None:
        # 0.5 * 2 alone.
        loss, weights, mask = torch.tensor([2.0, 3.0]), torch.tensor([0.5, 3.0]), torch.tensor([True, False])
        assert weighted_sum(fill(loss), fill(weights), mask).item() == 1.0

    def test_bfloat16_is_summed_in_float32(self) -> None:
        # 256 + 1 is no number of bfloat16.
        total = weighted_sum(torch.tensor([256.0, 1.0], dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
        assert total.item() == 257.0 and total.dtype == torch.float32

    def test_float64_is_summed_in_float32(self) -> None:
        one = torch.ones(1)
        assert weighted_sum(one.double(), one).dtype == weighted_sum(one, one.double()).dtype == torch.float32
