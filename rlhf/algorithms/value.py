"""The critic's loss per token, and how much of the returns its values explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms.tokens import present

# E[x^2] - E[x]^2 of equal numbers is not 0 in floating point; below this share of E[x^2] it is rounding.
ROUNDING = 1.0e-10


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """loss_N: float32 [N], to be weighted and summed. clipped_N: bool [N], where the clip took the gradient away."""

    loss_N: Tensor
    clipped_N: Tensor


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None, mask_N: Tensor | None = None
) -> ValueLoss:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 for each token; without `clip` (v - R)^2 / 2.

    The clipped value loss of PPO's implementation (OpenAI baselines, ppo2; described in Engstrom et al.,
    arXiv:2005.12729, "Value function clipping"). All inputs [N], in units of the reward; the gradient goes to
    `values_N` only. Where `mask_N` is False the loss is 0 and whatever stands there reaches neither value nor gradient.
    Raises ValueError for arrays of different shapes.
    """
    if not values_N.shape == old_values_N.shape == returns_N.shape:
        raise ValueError(
            f"values {tuple(values_N.shape)}, old values {tuple(old_values_N.shape)} and returns "
            f"{tuple(returns_N.shape)} have to have one shape"
        )
    values_N = present(values_N, mask_N).float()
    old_values_N = present(old_values_N, mask_N).detach().float()
    returns_N = present(returns_N, mask_N).detach().float()
    free_N = (values_N - returns_N).square() / 2
    if clip is None:
        return ValueLoss(free_N, torch.zeros_like(free_N, dtype=torch.bool))
    near_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
    bounded_N = (near_N - returns_N).square() / 2
    clipped_N = bounded_N > free_N
    return ValueLoss(torch.where(clipped_N, bounded_N, free_N), clipped_N)


def explained_variance(n: float, sum_r: float, sum_r2: float, sum_e: float, sum_e2: float) -> float | None:
    """Share of the returns' variance that the values explain, 1 - var(R - V) / var(R), from sums that ranks can add.

    `n` tokens, sums of returns R, of R^2, of errors R - V and of their squares, in float64. 1: the values are the
    returns; 0: no better than a constant; below 0: worse. None without tokens and where all returns are equal.
    """
    if n == 0:
        return None
    variance_r = sum_r2 / n - (sum_r / n) ** 2
    if variance_r <= ROUNDING * sum_r2 / n:
        return None
    return 1 - (sum_e2 / n - (sum_e / n) ** 2) / variance_r
