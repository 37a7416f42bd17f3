"""KL divergence of the policy from another model: estimates per token and their place in the loss.

All are on tokens that the policy sampled.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf.algorithms.tokens import finite_logprobs, ratio_of

Estimator = Literal["k1", "k2", "k3", "abs"]

# A difference beyond this many nats counts as this many and has no gradient. It makes a log-prob of -inf finite.
LARGEST_DIFFERENCE = 100.0
# e^20 is 5e8. Beyond it the exponential is continued by its tangent: same sign and slope, and no overflow in float32,
# where e^89 is infinite.
LARGEST_EXPONENT = 20.0


def _exp_minus_one_minus(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, continued by its tangent above `LARGEST_EXPONENT`."""
    # The clamp comes before exp: clamping its result would leave inf * 0 = NaN in the gradient.
    inside = x.clamp(max=LARGEST_EXPONENT)
    return torch.expm1(inside) - inside + (x - inside) * torch.expm1(inside)


def kl_per_token(logprobs_N: Tensor, reference_N: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) for each token, in nats, in float32; the gradient goes to `logprobs_N` only.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence",
    2020), abs = |d|, whose slope at 0 is 0. On average over tokens of the policy k1 and k3 are the KL, k2 is it to
    second order, and abs is no estimate of it but a penalty on distance. Shapes are equal, any. Value and gradient are
    finite for every difference, also an infinite one; a NaN passes through. Raises ValueError for other names.
    """
    difference_N = finite_logprobs(logprobs_N) - finite_logprobs(reference_N).detach()
    difference_N = difference_N.clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    if estimator == "k3":
        return _exp_minus_one_minus(-difference_N)
    if estimator == "abs":
        return difference_N.abs()
    raise ValueError(f"unknown KL estimator {estimator!r}: use k1, k2, k3 or abs")


def kl_loss_per_token(
    logprobs_N: Tensor, reference_N: Tensor, estimator: Estimator, old_logprobs_N: Tensor | None = None
) -> Tensor:
    """The KL term of the loss for each token: the estimate, or with `old_logprobs_N` its unbiased-gradient variant.

    The gradient of a plain estimate is not that of the KL: averaged over the policy's tokens that of k1 is 0, and that
    of k3 belongs to KL(reference || policy). Weighted with the ratio r = pi / pi_old, through which the gradient goes
    too, k1 and k3 have the gradient of KL(policy || reference): DeepSeek-V3.2, arXiv:2512.02556, section 3.1,
    "Unbiased KL Estimate", which does it with k3. Float32, nats, any one shape, finite for every difference.
    """
    kl_N = kl_per_token(logprobs_N, reference_N, estimator)
    if old_logprobs_N is None:
        return kl_N
    return kl_N * ratio_of(finite_logprobs(logprobs_N) - finite_logprobs(old_logprobs_N).detach())


def add_kl(loss_N: Tensor, kl_N: Tensor, coefficient: float) -> Tensor:
    """loss + coefficient * KL for each token; with coefficient 0 the loss itself, whatever `kl_N` holds.

    0 * NaN is NaN: a term that is switched off must not be added at all.
    """
    return loss_N if coefficient == 0 else loss_N + coefficient * kl_N
