"""Small inputs of policy losses that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms.losses import LossTokens, policy_loss
from rlhf.config.schema import AlgorithmConfig


def algorithm(loss: str, **sections: Any) -> AlgorithmConfig:
    return AlgorithmConfig(loss=loss, **sections)


def rows_of(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def single(ratios: Sequence[float], advantages: Sequence[float]) -> LossTokens:
    """Responses of one token each, with these ratios; the log-probs carry a gradient."""
    count = len(ratios)
    logprobs = torch.tensor(ratios).log().requires_grad_()
    return LossTokens(logprobs, torch.zeros(count), torch.tensor(advantages), torch.arange(count), count)


def gradient(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    (result,) = torch.autograd.grad(policy_loss(tokens, config).loss_N.sum(), tokens.logprobs_N)
    return result
