"""Policy losses per token. How tokens add up to one number is in `rlhf.algorithms.aggregation`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# e^20 is 5e8: far outside every clip range, and finite in float32 together with any advantage of a group.
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token results, all of the shape of the inputs; `ratio` and `clipped` carry no gradient.

    loss: to be weighted and summed; ratio: pi / pi_old; clipped: True where the clip took the gradient away.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old; PPO, arXiv:1707.06347, eq. 7.

    All inputs have one shape; the result is float32. Where `mask` is False the loss is 0 and the values there, NaN
    and infinities included, reach neither the result nor any gradient.
    """
    logprobs, old_logprobs, advantages = logprobs.float(), old_logprobs.detach().float(), advantages.float()
    if mask is not None:
        # Safe values go in before the arithmetic: selecting afterwards would leave NaN * 0 in the gradient.
        zero = torch.zeros((), device=logprobs.device)
        logprobs = torch.where(mask, logprobs, zero)
        old_logprobs = torch.where(mask, old_logprobs, zero)
        advantages = torch.where(mask, advantages, zero)
    ratio = (logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())


def weighted_sum(loss: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of `weights * loss` over all tokens, float32; where `mask` is False nothing counts, not even a NaN."""
    if mask is not None:
        zero = torch.zeros((), device=loss.device)
        loss, weights = torch.where(mask, loss, zero), torch.where(mask, weights, zero)
    return (loss.float() * weights.float()).sum()
