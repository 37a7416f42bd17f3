"""Importance weights between engine and trainer, by numbers worked out by hand, and what holds for every method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.correction import Correction, correct, effective_sample_size, mismatch_kl
from rlhf.algorithms.losses import LossTokens, policy_loss
from rlhf.config.schema import AlgorithmConfig, CorrectionConfig

NAN, INF = float("nan"), math.inf
METHODS = [m for m in get_args(CorrectionConfig.model_fields["method"].annotation) if m != "none"]
TRUNCATING = {"token_truncate", "sequence_truncate"}


def rows_of(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def weights(method: str, ratios: Sequence[float], lengths: Sequence[int], **bounds: Any) -> Correction:
    """The correction of tokens with these ratios pi_old / pi_engine; engine log-probs are all -1."""
    old = torch.tensor(ratios).log() - 1.0
    config = CorrectionConfig(method=method, **bounds)  # type: ignore[arg-type]
    found = correct(old, torch.full_like(old, -1.0), rows_of(lengths), len(lengths), config)
    assert found is not None
    return found


class TestMethods:
    # Bounds are [0.5, 2]. Response one: ratios 0.4, 1.5, 3 (product 1.8, geometric mean 1.8^(1/3) = 1.21644);
    # response two: 2.5, 1.2 (product 3, geometric mean 1.73205); three: 0.1 alone.
    RATIOS, LENGTHS = (0.4, 1.5, 3.0, 2.5, 1.2, 0.1), (3, 2, 1)

    @pytest.mark.parametrize(
        ("method", "expected"),
        [
            ("token_truncate", [0.4, 1.5, 2.0, 2.0, 1.2, 0.1]),
            ("token_mask", [0.0, 1.5, 0.0, 0.0, 1.2, 0.0]),
            ("sequence_truncate", [1.8, 1.8, 1.8, 2.0, 2.0, 0.1]),
            ("sequence_mask", [1.8, 1.8, 1.8, 0.0, 0.0, 0.0]),
            ("geometric_mask", [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
            ("decoupled", [0.4, 1.5, 0.0, 0.0, 1.2, 0.1]),
        ],
    )
    def test_weights_and_what_is_kept(self, method: str, expected: list[float]) -> None:
        found = weights(method, self.RATIOS, self.LENGTHS)
        torch.testing.assert_close(found.weights_N, torch.tensor(expected))
        assert found.kept_N.tolist() == [weight > 0 for weight in expected]

    def test_geometric_mean_above_the_bound_is_left_out(self) -> None:
        # Product 6.25 and 9: geometric means 2.5 (out) and, over four tokens of 3, 3, 1, 1, 1.73205 (in).
        found = weights("geometric_mask", [2.5, 2.5, 3.0, 3.0, 1.0, 1.0], [2, 4])
        assert found.weights_N.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]

    @pytest.mark.parametrize("method", METHODS)
    def test_bounds_belong_to_what_is_kept(self, method: str) -> None:
        # Ratio exactly 1, bounds [1, 1].
        assert weights(method, [1.0, 1.0], [2], low=1.0, high=1.0).weights_N.tolist() == [1.0, 1.0]

    def test_weight_of_a_far_token_is_that_of_twenty_nats(self) -> None:
        # e^-100 is 0 in float32, and the token would no longer count as kept.
        engine, old = torch.zeros(1), torch.tensor([-100.0])
        found = correct(old, engine, rows_of([1]), 1, CorrectionConfig(method="token_truncate"))
        assert found is not None and found.kept_N.tolist() == [True]
        assert found.weights_N.item() == pytest.approx(math.exp(-20))

    def test_none_corrects_nothing(self) -> None:
        config = CorrectionConfig(method="none")
        assert correct(torch.zeros(1), torch.zeros(1), rows_of([1]), 1, config) is None

    def test_weight_is_that_of_the_trainer_before_the_update(self) -> None:
        # Engine -1.0, trainer before the update -1.2, now -0.5: exp(-0.2) = 0.818731, and not exp(0.5) = 1.648721.
        # Engine -3.0: exp(1.8) = 6.05, at most 2.
        old, engine = torch.tensor([-1.2, -1.2]), torch.tensor([-1.0, -3.0])
        found = correct(old, engine, rows_of([2]), 1, CorrectionConfig(method="token_truncate", high=2.0))
        assert found is not None
        torch.testing.assert_close(found.weights_N, torch.tensor([0.818731, 2.0]))

    def test_weight_times_ratio_of_the_loss_is_the_ratio_to_the_engine(self) -> None:
        # exp(-1.2 + 1.0) * exp(-1.1 + 1.2) = exp(-1.1 + 1.0) = 0.904837; loss -0.904837 for advantage 1.
        old, engine, now = torch.tensor([-1.2]), torch.tensor([-1.0]), torch.tensor([-1.1])
        found = correct(old, engine, rows_of([1]), 1, CorrectionConfig(method="decoupled"))
        assert found is not None
        tokens = LossTokens(now, old, torch.ones(1), rows_of([1]), 1, found.weights_N)
        torch.testing.assert_close(policy_loss(tokens, AlgorithmConfig()).loss_N, torch.tensor([-0.904837]))

    def test_long_response_keeps_its_product(self) -> None:
        # 400 tokens, half with log-ratio 0.3 and half with -0.298: sum 60 - 59.6 = 0.4, e^0.4 = 1.49182.
        old = torch.tensor([0.3, -0.298]).repeat(200) - 1.0
        found = correct(
            old, torch.full((400,), -1.0), rows_of([400]), 1, CorrectionConfig(method="sequence_mask", high=2.0)
        )
        assert found is not None
        torch.testing.assert_close(found.weights_N, torch.full((400,), 1.49182), atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("old", [0.0, -0.5, -20.0, -100.0, -INF])
    @pytest.mark.parametrize("engine", [0.0, -0.5, -20.0, -100.0, -INF])
    def test_weights_are_finite_and_bounded(self, method: str, dtype: torch.dtype, old: float, engine: float) -> None:
        config = CorrectionConfig(method=method, low=0.5, high=3.0)  # type: ignore[arg-type]
        pair = [torch.tensor([value, -1.0], dtype=dtype) for value in (old, engine)]
        found = correct(*pair, rows_of([2]), 1, config)
        assert found is not None and found.weights_N.dtype == torch.float32
        assert torch.isfinite(found.weights_N).all()
        assert (found.weights_N >= 0).all() and (found.weights_N <= 3.0).all()
        if method not in TRUNCATING | {"decoupled"}:
            assert ((found.weights_N >= 0.5) | (found.weights_N == 0)).all()

    def test_weights_are_exactly_one_where_engine_and_trainer_agree(self, method: str) -> None:
        logprobs = -torch.rand(50, generator=torch.Generator().manual_seed(3)) * 20
        config = CorrectionConfig(method=method)  # type: ignore[arg-type]
        found = correct(logprobs, logprobs.clone(), rows_of([20, 30]), 2, config)
        assert found is not None and (found.weights_N == 1).all() and found.kept_N.all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_token_that_neither_can_sample_has_weight_one(self, method: str, dtype: torch.dtype) -> None:
        never = torch.tensor([-INF], dtype=dtype)
        found = correct(never, never, rows_of([1]), 1, CorrectionConfig(method=method))  # type: ignore[arg-type]
        assert found is not None and found.weights_N.tolist() == [1.0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_weights_are_float32_whatever_comes_in(self, method: str, dtype: torch.dtype) -> None:
        old = engine = torch.tensor([-1.0])
        config = CorrectionConfig(method=method)  # type: ignore[arg-type]
        for pair in ((old.to(dtype), engine), (old, engine.to(dtype))):
            found = correct(*pair, rows_of([1]), 1, config)
            assert found is not None and found.weights_N.dtype == torch.float32

    def test_weights_have_no_gradient(self, method: str) -> None:
        old, engine = (torch.tensor([-1.0, -1.1], requires_grad=True) for _ in range(2))
        found = correct(old, engine, rows_of([2]), 1, CorrectionConfig(method=method))  # type: ignore[arg-type]
        assert found is not None and not found.weights_N.requires_grad

    def test_missing_engine_log_prob_is_not_hidden(self, method: str) -> None:
        config = CorrectionConfig(method=method)  # type: ignore[arg-type]
        found = correct(torch.zeros(2), torch.tensor([NAN, 0.0]), rows_of([1, 1]), 2, config)
        assert found is not None and found.weights_N.isnan().tolist() == [True, False]

    @settings(max_examples=25)
    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
        st.sampled_from([NAN, INF, -INF, 1e6]),
        st.integers(0, 2**31),
    )
    def test_absent_slots_change_nothing(self, method: str, lengths: list[int], poison: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        old, engine = torch.randn(2, sum(lengths), generator=generator)
        mask = torch.rand(sum(lengths), generator=generator) < 0.7
        rows, config = rows_of(lengths), CorrectionConfig(method=method)  # type: ignore[arg-type]
        poisoned = (torch.where(mask, values, poison) for values in (old, engine))
        found = correct(*poisoned, torch.where(mask, rows, -7), len(lengths), config, mask)
        packed = correct(old[mask], engine[mask], rows[mask], len(lengths), config)
        assert found is not None and packed is not None
        assert torch.equal(found.weights_N[mask], packed.weights_N)
        assert not found.weights_N[~mask].any() and not found.kept_N[~mask].any()

    @settings(max_examples=25)
    @given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 2**31))
    def test_weights_do_not_depend_on_the_other_responses(self, method: str, lengths: list[int], seed: int) -> None:
        pair = torch.randn(2, sum(lengths), generator=torch.Generator().manual_seed(seed))
        config = CorrectionConfig(method=method)  # type: ignore[arg-type]
        together = correct(pair[0], pair[1], rows_of(lengths), len(lengths), config)
        parts = [
            correct(old, engine, rows_of([len(old)]), 1, config)
            for old, engine in zip(pair[0].split(lengths), pair[1].split(lengths), strict=True)
        ]
        assert together is not None
        alone = torch.cat([part.weights_N for part in parts if part is not None])
        torch.testing.assert_close(together.weights_N, alone)


class TestEffectiveSampleSize:
    def test_equal_weights_count_in_full(self) -> None:
        # 4 weights of 0.5: 2^2 / (4 * 1) = 1
        assert effective_sample_size(2.0, 1.0, 4) == 1.0
        # Seven of 0.7: the quotient of the rounded sums is a little above 1.
        assert effective_sample_size(sum([0.7] * 7), sum([0.7 * 0.7] * 7), 7) == 1.0

    def test_one_weight_of_four_counts_a_quarter(self) -> None:
        # 3, 0, 0, 0: 9 / (4 * 9)
        assert effective_sample_size(3.0, 9.0, 4) == 0.25

    def test_uneven_weights(self) -> None:
        # 1, 3: 16 / (2 * 10) = 0.8
        assert effective_sample_size(4.0, 10.0, 2) == pytest.approx(0.8)

    def test_absent_without_tokens_or_weights(self) -> None:
        assert effective_sample_size(0.0, 0.0, 0) is None
        assert effective_sample_size(0.0, 0.0, 5) is None

    @given(st.lists(st.floats(0, 10), min_size=1, max_size=50).filter(lambda values: sum(v * v for v in values) > 0))
    def test_lies_between_zero_and_one(self, values: list[float]) -> None:
        size = effective_sample_size(sum(values), sum(v * v for v in values), len(values))
        assert size is not None and 0 < size <= 1


class TestMismatchKL:
    def test_is_that_of_the_engine_to_the_trainer(self) -> None:
        # old - engine = 0.5: e^0.5 - 1 - 0.5 = 0.148721; -0.5: e^-0.5 - 1 + 0.5 = 0.106531; equal: 0
        found = mismatch_kl(torch.tensor([-1.0, -1.5, -1.0]), torch.tensor([-1.5, -1.0, -1.0]))
        torch.testing.assert_close(found, torch.tensor([0.148721, 0.106531, 0.0]), atol=1e-6, rtol=0)

    def test_average_over_the_engine_is_the_kl(self) -> None:
        # engine (0.75, 0.25), trainer (0.5, 0.5): 0.75 ln 1.5 + 0.25 ln 0.5 = 0.130812
        engine = torch.tensor([0.75, 0.25])
        assert (engine * mismatch_kl(torch.full((2,), 0.5).log(), engine.log())).sum().item() == pytest.approx(0.130812)

    def test_has_no_gradient_and_is_finite(self) -> None:
        old, engine = torch.cartesian_prod(*[torch.tensor([0.0, -0.5, -20.0, -100.0, -INF])] * 2).T
        found = mismatch_kl(old.requires_grad_(), engine.requires_grad_())
        assert torch.isfinite(found).all() and (found >= 0).all() and not found.requires_grad
