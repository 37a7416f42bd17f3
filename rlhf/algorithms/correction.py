"""Engine and trainer disagree a little about the policy: importance weights that make up for it, and how far they are.

The ratio of a token is exp(old - engine): `old` is the trainer's log-prob before the first update of the batch, never
that of the current policy, and `engine` is that of the engine which sampled the token. With ratios to `old` in the
policy loss, the two factors multiply to pi / pi_engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms import tokens as flat
from rlhf.algorithms.kl import kl_per_token
from rlhf.config.schema import CorrectionConfig


@dataclass(frozen=True, slots=True)
class Correction:
    """weights_N: float32 [N] without gradient, 0 to `high`, 0 in absent slots. kept_N: bool [N], weight above 0."""

    weights_N: Tensor
    kept_N: Tensor


def correct(
    old_N: Tensor,
    engine_N: Tensor,
    rows_N: Tensor,
    samples: int,
    config: CorrectionConfig,
    mask_N: Tensor | None = None,
) -> Correction | None:
    """Weights of the policy loss for tokens [N] that the engine sampled; None for method `none`.

    With w = exp(old - engine) of the token:
    token_truncate: min(w, high), TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025; truncation: Ionides, 2008). token_mask: w within [low, high], else 0, IcePop (Ling team,
    arXiv:2510.18855, eq. 1 and 2). sequence_truncate, sequence_mask: the same with the product of w over the response
    (Liu et al., "When speed kills stability", 2025). geometric_mask: 1 where the geometric mean of w over the response
    is within [low, high], else 0: rejection whose bounds don't depend on the length (Geo-RS in verl's rollout
    correction). decoupled: w, and 0 above high: the weight that takes decoupled PPO from the behaviour policy to the
    proximal one (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5). A token of weight 0 still counts in
    the loss's denominator.

    Finite for every difference, infinite ones included; a NaN stays NaN.
    """
    if config.method == "none":
        return None
    old_N, engine_N = flat.present(old_N, mask_N).detach(), flat.present(engine_N, mask_N).detach()
    log_ratio_N = flat.finite_logprobs(old_N) - flat.finite_logprobs(engine_N)
    if config.method.startswith("sequence"):
        log_ratio_N = flat.sequence_sum(log_ratio_N, rows_N, samples, mask_N)
    elif config.method == "geometric_mask":
        log_ratio_N = flat.sequence_mean(log_ratio_N, rows_N, samples, mask_N)
    weights_N = flat.present(_bounded(flat.ratio_of(log_ratio_N), config), mask_N)
    return Correction(weights_N, weights_N > 0)


def _bounded(ratio_N: Tensor, config: CorrectionConfig) -> Tensor:
    """The weight of each ratio under the method's bounds."""
    if config.method in ("token_truncate", "sequence_truncate"):
        return ratio_N.clamp(max=config.high)
    outside_N = ratio_N > config.high
    if config.method != "decoupled":
        outside_N = outside_N | (ratio_N < config.low)
    weights_N = ratio_N
    if config.method == "geometric_mask":
        weights_N = torch.where(ratio_N.isnan(), ratio_N, torch.ones_like(ratio_N))
    return torch.where(outside_N, torch.zeros_like(ratio_N), weights_N)


def effective_sample_size(sum_w: float, sum_w2: float, count: float) -> float | None:
    """Share of `count` weighted tokens that equally weighted ones would be worth: (sum w)^2 / (count * sum w^2).

    Kish, "Survey Sampling", 1965; in (0, 1], and 1 for equal weights. From sums, so that ranks can add theirs up. None
    when there are no tokens or all weights are 0.
    """
    if count == 0 or sum_w2 == 0:
        return None
    return min(sum_w * sum_w / (count * sum_w2), 1.0)


def mismatch_kl(old_N: Tensor, engine_N: Tensor) -> Tensor:
    """Estimate KL(engine || trainer) for each token that the engine sampled: float32 [N], nats, no gradient.

    k3 in the direction of the sampling: exp(old - engine) - 1 - (old - engine), never below 0 (Schulman,
    "Approximating KL divergence", 2020). Finite for every difference; a NaN passes through.
    """
    return kl_per_token(engine_N.detach(), old_N, "k3")
