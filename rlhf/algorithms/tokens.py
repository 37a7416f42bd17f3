"""What the formulas share: log-probs that stay finite, slots that are not there, and sums over each response.

Everything here works on flat arrays over response tokens, sample after sample; `rows_N` holds each token's sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

# e^20 is 5e8: far outside every clip range, and finite in float32 together with any advantage of a group. A token
# whose log-ratio is further from 0 has the ratio of this one and no gradient through it.
LARGEST_LOG_RATIO = 20.0
# No model's log-prob of a token that it sampled is near -10000; -inf counts as this, so that -inf against -inf is 0 and
# not NaN, and a whole response's sum stays exact enough in float32.
LARGEST_LOGPROB = 1.0e4


def present(values_N: Tensor, mask_N: Tensor | None) -> Tensor:
    """Put 0 where `mask_N` is False; shape and dtype stay.

    It has to happen before the arithmetic: selecting afterwards would leave NaN * 0 in the gradient.
    """
    return values_N if mask_N is None else torch.where(mask_N, values_N, torch.zeros_like(values_N))


def finite_logprobs(logprobs_N: Tensor) -> Tensor:
    """Log-probs in float32, nats, bounded by `LARGEST_LOGPROB`; any shape. A NaN stays NaN."""
    return logprobs_N.float().clamp(-LARGEST_LOGPROB, LARGEST_LOGPROB)


def ratio_of(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios within `LARGEST_LOG_RATIO` of 0: finite in value and gradient; any shape."""
    # The clamp comes before exp: clamping its result would leave inf * 0 = NaN in the gradient.
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(values_N: Tensor, rows_N: Tensor, samples: int, mask_N: Tensor | None = None) -> Tensor:
    """Sum `values_N` over the tokens of each sample and put it back on each of them: [N], float32.

    Where `mask_N` is False nothing counts, and the slot gets 0.
    """
    rows_N = present(rows_N, mask_N)
    sums_S = torch.zeros(samples, device=values_N.device).index_add(0, rows_N, present(values_N.float(), mask_N))
    return present(sums_S[rows_N], mask_N)


def sequence_mean(values_N: Tensor, rows_N: Tensor, samples: int, mask_N: Tensor | None = None) -> Tensor:
    """Mean of `values_N` over the tokens of each sample, put back on each of them: [N], float32.

    Where `mask_N` is False nothing counts, and the slot gets 0.
    """
    counts_N = sequence_sum(torch.ones_like(values_N, dtype=torch.float32), rows_N, samples, mask_N)
    return sequence_sum(values_N, rows_N, samples, mask_N) / counts_N.clamp(min=1)
