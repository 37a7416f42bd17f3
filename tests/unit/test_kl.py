"""KL estimates, their gradients, the term of the loss and its controller, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.controller import KLController
from rlhf.algorithms.kl import Estimator, add_kl, kl_loss_per_token, kl_per_token
from rlhf.config.schema import KLConfig

NAN, INF = float("nan"), math.inf
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
DIFFERENCES = [0.0, -0.5, 0.5, -20.0, 20.0, -100.0, 100.0, -INF, INF]


def test_estimators_are_those_of_the_configuration() -> None:
    assert set(ESTIMATORS) == set(get_args(KLConfig.model_fields["estimator"].annotation))


class TestEstimates:
    @pytest.mark.parametrize(("estimator", "above", "below"), [("k1", 0.5, -0.5), ("k2", 0.125, 0.125)])
    def test_k1_and_k2_at_half_a_nat(self, estimator: Estimator, above: float, below: float) -> None:
        # d = 0.5 and -0.5: d; d^2 / 2
        found = kl_per_token(torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0]), estimator)
        assert found.tolist() == [above, below]

    def test_k3_at_half_a_nat(self) -> None:
        # d = 0.5: e^-0.5 - 1 + 0.5 = 0.106531; d = -0.5: e^0.5 - 1 - 0.5 = 0.148721
        found = kl_per_token(torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0]), "k3")
        torch.testing.assert_close(found, torch.tensor([0.106531, 0.148721]), atol=1e-6, rtol=0)

    def test_abs_at_half_a_nat(self) -> None:
        assert kl_per_token(torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0]), "abs").tolist() == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("estimator", "expected"),
        # d = 0.5, 0, -0.5. k1: 1. k2: d. k3: 1 - e^-d. abs: the sign, 0 at 0.
        [
            ("k1", [1.0, 1.0, 1.0]),
            ("k2", [0.5, 0.0, -0.5]),
            ("k3", [1 - math.exp(-0.5), 0.0, 1 - math.exp(0.5)]),
            ("abs", [1.0, 0.0, -1.0]),
        ],
    )
    def test_gradients(self, estimator: Estimator, expected: list[float]) -> None:
        logprobs = torch.tensor([-1.0, -1.5, -2.0], requires_grad=True)
        kl = kl_per_token(logprobs, torch.full((3,), -1.5), estimator)
        torch.testing.assert_close(torch.autograd.grad(kl.sum(), logprobs)[0], torch.tensor(expected))

    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    def test_average_over_the_policy_is_the_kl(self, estimator: Estimator) -> None:
        # p = (0.75, 0.25), q = (0.5, 0.5): 0.75 ln 1.5 + 0.25 ln 0.5 = 0.304099 - 0.173287 = 0.130812
        policy = torch.tensor([0.75, 0.25])
        kl = kl_per_token(policy.log(), torch.tensor([0.5, 0.5]).log(), estimator)
        assert (policy * kl).sum().item() == pytest.approx(0.130812, abs=1e-6)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("reference", DIFFERENCES)
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

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_token_that_both_exclude_has_no_divergence(self, estimator: Estimator, dtype: torch.dtype) -> None:
        logprobs = torch.tensor([-INF], dtype=dtype, requires_grad=True)
        kl = kl_per_token(logprobs, torch.tensor([-INF]), estimator)
        other = kl_per_token(torch.tensor([-INF]), logprobs, estimator)
        assert kl.dtype == other.dtype == torch.float32 and other.item() == 0.0
        assert kl.item() == 0.0 and torch.isfinite(torch.autograd.grad(kl.sum(), logprobs)[0]).all()

    @pytest.mark.parametrize(
        ("estimator", "expected"),
        # Beyond 100 nats a difference counts as 100; k3 below -20 goes on along its tangent.
        [("k1", [100.0, -100.0]), ("k2", [5000.0, 5000.0]), ("abs", [100.0, 100.0])],
    )
    def test_far_differences_count_as_a_hundred_nats(self, estimator: Estimator, expected: list[float]) -> None:
        assert kl_per_token(torch.tensor([150.0, -150.0]), torch.zeros(2), estimator).tolist() == expected

    def test_k3_goes_on_along_its_tangent(self) -> None:
        # d = -30: e^20 - 1 - 20 + 10 (e^20 - 1) = 11 e^20 - 31; d = 150 counts as 100: e^-100 - 1 + 100 = 99
        found = kl_per_token(torch.tensor([-30.0, 150.0]), torch.zeros(2), "k3")
        torch.testing.assert_close(found, torch.tensor([11 * math.exp(20) - 31, 99.0]))

    @pytest.mark.parametrize("difference", [-60.0, -19.0, 19.0, 30.0, 60.0])
    def test_k3_pulls_towards_the_reference_however_far_it_is(self, difference: float) -> None:
        logprobs = torch.tensor([difference], requires_grad=True)
        kl_per_token(logprobs, torch.zeros(1), "k3").sum().backward()
        assert logprobs.grad is not None
        assert math.copysign(1, logprobs.grad.item()) == math.copysign(1, difference)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_gradient_does_not_reach_the_reference(self, estimator: Estimator) -> None:
        logprobs, reference, old = (torch.tensor([-2.0 + i], requires_grad=True) for i in range(3))
        kl_loss_per_token(logprobs, reference, estimator, old).sum().backward()
        assert logprobs.grad is not None and reference.grad is None and old.grad is None

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_bfloat16_is_computed_with_in_float32(self, estimator: Estimator) -> None:
        # The difference 0.0546875 is a number of bfloat16, its square 0.00299072 is none.
        logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.0546875])
        found = kl_per_token(logprobs.bfloat16(), reference.bfloat16(), estimator)
        assert found.dtype == torch.float32 and torch.equal(found, kl_per_token(logprobs, reference, estimator))

    def test_unknown_estimator_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="use k1, k2, k3 or abs"):
            kl_per_token(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def averaged_gradient(estimator: Estimator, logits: Tensor, reference: Tensor, unbiased: bool) -> Tensor:
    """Gradient of the KL term averaged over both tokens of a two-token softmax, sampled from the policy itself."""
    logits = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    old = logprobs.detach() if unbiased else None
    # The probabilities of the sampling carry no gradient: the tokens are given.
    total = (logprobs.detach().exp() * kl_loss_per_token(logprobs, reference, estimator, old)).sum()
    return torch.autograd.grad(total, logits)[0]


class TestLossTerm:
    LOGITS = torch.tensor([math.log(3.0), 0.0])  # p = (0.75, 0.25)
    REFERENCE = torch.tensor([0.5, 0.5]).log()

    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    def test_unbiased_variant_has_the_gradient_of_the_kl(self, estimator: Estimator) -> None:
        # d KL / d z0 = p0 p1 (ln(p0 / q0) - ln(p1 / q1)) = 0.1875 * ln 3 = 0.205990, and minus that for z1.
        found = averaged_gradient(estimator, self.LOGITS, self.REFERENCE, unbiased=True)
        torch.testing.assert_close(found, torch.tensor([0.205990, -0.205990]))
        exact = self.LOGITS.clone().requires_grad_()
        policy = torch.softmax(exact, -1)
        kl = (policy * (policy.log() - self.REFERENCE)).sum()
        torch.testing.assert_close(found, torch.autograd.grad(kl, exact)[0])

    def test_plain_k1_has_no_gradient_on_average(self) -> None:
        found = averaged_gradient("k1", self.LOGITS, self.REFERENCE, unbiased=False)
        torch.testing.assert_close(found, torch.zeros(2), atol=1e-7, rtol=0)

    def test_plain_k2_has_the_gradient_of_the_kl(self) -> None:
        # E[d grad log pi]: the same 0.1875 * ln 3.
        found = averaged_gradient("k2", self.LOGITS, self.REFERENCE, unbiased=False)
        torch.testing.assert_close(found, torch.tensor([0.205990, -0.205990]))

    def test_plain_k3_has_the_gradient_of_the_reverse_kl(self) -> None:
        # grad KL(q || p) = p - q = (0.25, -0.25)
        found = averaged_gradient("k3", self.LOGITS, self.REFERENCE, unbiased=False)
        torch.testing.assert_close(found, torch.tensor([0.25, -0.25]))

    def test_unbiased_variant_weights_the_estimate_with_the_ratio(self) -> None:
        # d = 0.5, ratio e^0.2 = 1.221403: k1: 0.610701
        found = kl_loss_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), "k1", torch.tensor([-1.2]))
        assert found.item() == pytest.approx(0.610701, abs=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_token_that_no_policy_can_sample_any_more_counts_with_ratio_one(self, dtype: torch.dtype) -> None:
        # d = -inf counts as -100; old and current log-prob -inf: ratio 1.
        never = torch.tensor([-INF])
        for old, new in ((never, never.to(dtype)), (never.to(dtype), never)):
            found = kl_loss_per_token(new, torch.zeros(1), "k1", old)
            assert found.tolist() == [-100.0] and found.dtype == torch.float32

    def test_without_old_log_probs_it_is_the_estimate(self) -> None:
        logprobs, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
        for estimator in ESTIMATORS:
            found = kl_loss_per_token(logprobs, reference, estimator)
            assert torch.equal(found, kl_per_token(logprobs, reference, estimator))

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("old", DIFFERENCES)
    @pytest.mark.parametrize("reference", DIFFERENCES)
    def test_value_and_gradient_are_finite(self, estimator: Estimator, old: float, reference: float) -> None:
        logprobs = torch.zeros(1, requires_grad=True)
        value = kl_loss_per_token(logprobs, torch.tensor([reference]), estimator, torch.tensor([old])).sum()
        (grad,) = torch.autograd.grad(value, logprobs)
        assert torch.isfinite(value) and torch.isfinite(grad).all()

    @pytest.mark.parametrize("kl", [[NAN, 1.0], [INF, -INF]])
    def test_coefficient_zero_leaves_the_loss_as_it_is_bit_for_bit(self, kl: list[float]) -> None:
        loss = torch.tensor([0.1, -2.7], requires_grad=True)
        term = torch.tensor(kl, requires_grad=True)
        total = add_kl(loss, term, 0.0)
        assert torch.equal(total, loss)
        total.sum().backward()
        assert loss.grad is not None and loss.grad.tolist() == [1.0, 1.0] and term.grad is None

    def test_term_is_added_with_its_coefficient(self) -> None:
        # 1 + 0.1 * 5 = 1.5
        assert add_kl(torch.tensor([1.0]), torch.tensor([5.0]), 0.1).item() == 1.5


def adaptive(**fields: Any) -> KLController:
    return KLController(
        KLConfig(**{"coefficient": 0.2, "controller": "adaptive", "target": 0.1, "horizon": 1000, **fields})
    )


class TestController:
    def test_fixed_coefficient_stays(self) -> None:
        controller = KLController(KLConfig(coefficient=0.05))
        controller.update(100.0, 500)
        assert controller.coefficient == 0.05

    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            # 0.11 / 0.1 - 1 = 0.1: 0.2 * (1 + 0.1 * 250 / 1000) = 0.205
            (0.11, 0.205),
            # 0.09 / 0.1 - 1 = -0.1: 0.2 * (1 - 0.025) = 0.195
            (0.09, 0.195),
            # Errors of 9, -1 and -3 count as 0.2, -0.2 and -0.2: 0.2 * 1.05 and 0.2 * 0.95
            (1.0, 0.21),
            (0.0, 0.19),
            (-0.2, 0.19),
            (0.1, 0.2),
            (INF, 0.21),
            (NAN, 0.2),
        ],
    )
    def test_adaptive_coefficient_follows_the_error(self, kl: float, expected: float) -> None:
        controller = adaptive()
        controller.update(kl, 250)
        assert controller.coefficient == pytest.approx(expected)

    def test_batch_larger_than_the_horizon_counts_as_one_horizon(self) -> None:
        # Error -0.2: 0.2 * 0.8 = 0.16, where 10000 / 1000 would give 0.2 * (1 - 2) < 0.
        controller = adaptive()
        controller.update(0.0, 10_000)
        assert controller.coefficient == pytest.approx(0.16)

    def test_updates_build_on_each_other(self) -> None:
        # 0.2 * 1.2 * 1.2 = 0.288
        controller = adaptive()
        controller.update(1.0, 1000)
        controller.update(1.0, 1000)
        assert controller.coefficient == pytest.approx(0.288)

    def test_coefficient_settles_where_the_kl_is_on_target(self) -> None:
        # A policy whose KL is 0.02 / coefficient: on target at 0.2.
        controller = adaptive(coefficient=1.0)
        for _ in range(200):
            controller.update(0.02 / controller.coefficient, 500)
        assert controller.coefficient == pytest.approx(0.2, rel=1e-3)

    def test_state_continues_a_run(self) -> None:
        first, second = adaptive(), adaptive()
        first.update(1.0, 1000)
        state = first.state_dict()
        assert state == {"coefficient": pytest.approx(0.24)}
        second.load_state_dict(state)
        assert second.coefficient == first.coefficient

    def test_fixed_controller_keeps_its_configured_coefficient(self) -> None:
        controller = KLController(KLConfig(coefficient=0.05))
        controller.load_state_dict({"coefficient": 0.7})
        assert controller.coefficient == 0.05

    @pytest.mark.parametrize("coefficient", [NAN, INF, -0.1])
    def test_damaged_state_is_an_error(self, coefficient: float) -> None:
        with pytest.raises(ValueError, match="KL coefficient"):
            adaptive().load_state_dict({"coefficient": coefficient})

    def test_coefficient_zero_of_a_state_is_taken(self) -> None:
        controller = adaptive()
        controller.load_state_dict({"coefficient": 0.0})
        assert controller.coefficient == 0.0
