"""Per-token estimators of the KL divergence of the policy from another model, on tokens that the policy sampled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# A difference beyond this many nats counts as this many and has no gradient. It makes a log-prob of -inf finite.
LARGEST_DIFFERENCE = 100.0
# e^20 is 5e8. Beyond it the exponential is continued by its tangent: same sign and slope, and no overflow in float32,
# where e^89 is infinite.
LARGEST_EXPONENT = 20.0


def _exp_minus_one_minus(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, continued by its tangent above `LARGEST_EXPONENT`."""
    # The clamp comes before exp: clamping its result would leave inf * 0 = NaN in the gradient.
    inside = x.clamp(max=LARGEST_EXPONENT)
    return torch.expm1(inside) - inside + (x - inside) * (torch.expm1(inside).detach())


def kl_per_token(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) for each token, in nats, in float32; the gradient goes to `logprobs` only.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence",
    2020). Shapes are equal, any. Value and gradient are finite for every difference, also an infinite one; a NaN
    passes through.
    """
    difference = (logprobs.float() - reference.detach().float()).clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return _exp_minus_one_minus(-difference)
    raise ValueError(f"unknown KL estimator {estimator!r}: use k1, k2 or k3")
