"""Policy losses per token. How tokens add up to one number is in `rlhf.algorithms.aggregation`.

Every loss is a surrogate inside one skeleton, `policy_loss`. The skeleton casts to float32, empties the slots that are
not there before any arithmetic, detaches what carries no gradient, bounds the ratio, and multiplies in the weights of
`rlhf.algorithms.correction`. A surrogate is only its formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms import tokens as flat
from rlhf.config.catalogue import loss_spec
from rlhf.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Flat response tokens, all arrays [N], of `samples` whole responses; only `logprobs_N` gets a gradient.

    rows_N: int64, sample of each token, 0 to samples - 1. weights_N: importance weights of the correction, float.
    mask_N: bool; where it is False there is no token, and whatever stands in that slot, NaN and infinities included,
    reaches neither a value nor a gradient.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    rows_N: Tensor
    samples: int
    weights_N: Tensor | None = None
    mask_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SurrogateInput:
    """What a surrogate computes with: float32 [N], finite as far as the inputs are no NaN, 0 in absent slots.

    logprobs_N, log_ratio_N and ratio_N carry gradients, old_logprobs_N and advantages_N don't. log_ratio_N is
    log pi - log pi_old within `LARGEST_LOG_RATIO` of 0, and ratio_N its exponential; the difference itself, for means
    and sums over a response, is logprobs_N - old_logprobs_N.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    log_ratio_N: Tensor
    ratio_N: Tensor
    advantages_N: Tensor
    rows_N: Tensor
    samples: int
    mask_N: Tensor | None

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sample, put back on each of its tokens: [N]; absent slots don't count."""
        return flat.sequence_mean(values_N, self.rows_N, self.samples, self.mask_N)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token results [N]; absent slots have loss 0, ratio 1 and are not clipped.

    loss_N: float32, to be weighted and summed. ratio_N: pi / pi_old of each token, no gradient, 1 for losses without a
    ratio. clipped_N: bool, True where a clip or trust region took the gradient away (cispo: where it cut the weight).
    """

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


# Loss [N] before the correction's weights, and where it is clipped, bool [N].
Surrogate = Callable[[SurrogateInput, AlgorithmConfig], tuple[Tensor, Tensor]]


def ppo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Clipped surrogate max(-r A, -clip(r, 1 - low, 1 + high) A), and at most dual * |A| where A < 0.

    PPO, arXiv:1707.06347, eq. 7; two clip widths: DAPO, arXiv:2503.14476, eq. 10; dual clip: arXiv:1912.09729, eq. 5.
    """
    return _clipped(inputs.ratio_N, inputs.advantages_N, config, config.clip.dual)


def gspo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's clip on the ratio of the whole response, s = exp(mean over its tokens of log r): the same on each token.

    GSPO, arXiv:2507.18071, eq. 5 to 7. With `sequence_mean_token_mean` the weighted sum is the paper's objective. The
    mean is over the true differences: bounding each token's first would hide how far a response has moved.
    """
    sequence_ratio_N = flat.ratio_of(inputs.sequence_mean(inputs.logprobs_N - inputs.old_logprobs_N))
    return _clipped(sequence_ratio_N, inputs.advantages_N, config, dual=None)


def cispo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-sg(min(r, 1 + high)) A log pi: the ratio is a weight without gradient, cut from above; no token loses its own.

    CISPO of MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, without its lower bound, as there. `clipped` says where the
    weight was cut.
    """
    largest = 1 + config.clip.high
    weight_N = inputs.ratio_N.detach()
    return -weight_N.clamp(max=largest) * inputs.advantages_N * inputs.logprobs_N, weight_N > largest


def sapo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-f(r) A with the soft gate f(r) = sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A; nothing is clipped.

    SAPO, arXiv:2511.20347, eq. 5 and 6. The slope of f at r = 1 is 1, so the first update is the policy gradient.
    """
    positive_N = inputs.advantages_N > 0
    tau_N = torch.where(positive_N, config.sapo.positive, config.sapo.negative)
    gate_N = torch.sigmoid(tau_N * (inputs.ratio_N - 1)) * 4 / tau_N
    return -gate_N * inputs.advantages_N, torch.zeros_like(positive_N)


def reinforce(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-A log pi: the policy gradient without a ratio (Williams, 1992, section 4); nothing is clipped."""
    return -inputs.advantages_N * inputs.logprobs_N, torch.zeros_like(inputs.advantages_N, dtype=torch.bool)


def dppo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-r A, and 0 for a token that moves away from the old policy and is further from it than the threshold.

    Away: A > 0 and r > 1, or A < 0 and r < 1. Distance: total variation or KL(old || current) of the sampled token
    against all others: DPPO, arXiv:2602.04879, section 4.3, with the binary approximations of section 4.4. The paper's
    old policy is the engine's. No gradient goes through the mask.
    """
    distance_N = binary_divergence(inputs.old_logprobs_N, inputs.logprobs_N, config.dppo.divergence)
    log_ratio_N = inputs.log_ratio_N.detach()
    away_N = ((inputs.advantages_N > 0) & (log_ratio_N > 0)) | ((inputs.advantages_N < 0) & (log_ratio_N < 0))
    masked_N = away_N & (distance_N > config.dppo.threshold)
    loss_N = -inputs.ratio_N * inputs.advantages_N
    return torch.where(masked_N, torch.zeros_like(loss_N), loss_N), masked_N


SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dppo": dppo,
}


def policy_loss(tokens: LossTokens, config: AlgorithmConfig, surrogate: Surrogate | None = None) -> PolicyLoss:
    """The policy loss `config.loss` of each token, or that of a `surrogate` of one's own: [N], float32.

    Old log-probs of a loss without a ratio are not read. Raises ValueError for arrays of different shapes, for a name
    that is not built in when no surrogate is given, and for a surrogate whose results are not [N] and bool [N].
    """
    inputs = _inputs(tokens, loss_spec(config.loss).uses_ratio)
    surrogate = surrogate or SURROGATES.get(config.loss)
    if surrogate is None:
        known = ", ".join(SURROGATES)
        raise ValueError(f"algorithm.loss {config.loss!r} is not built in ({known}): pass its function as surrogate")
    loss_N, clipped_N = surrogate(inputs, config)
    shape = inputs.logprobs_N.shape
    if loss_N.shape != shape or clipped_N.shape != shape or clipped_N.dtype != torch.bool:
        raise ValueError(
            f"policy loss {config.loss!r} gave {tuple(loss_N.shape)} losses and {tuple(clipped_N.shape)} clip marks of "
            f"type {clipped_N.dtype} for {tuple(shape)} tokens: it has to give one loss and one bool per token"
        )
    if tokens.weights_N is not None:
        loss_N = loss_N * flat.present(tokens.weights_N.detach().float(), tokens.mask_N)
    if tokens.mask_N is not None:
        clipped_N = clipped_N & tokens.mask_N
    return PolicyLoss(flat.present(loss_N, tokens.mask_N), inputs.ratio_N.detach(), clipped_N)


def binary_divergence(old_logprobs_N: Tensor, logprobs_N: Tensor, divergence: str) -> Tensor:
    """Divergence of two distributions over {the sampled token, any other}, from that token's log-probs: float32 [N].

    tv: |p - p_old|, without unit. kl: p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), nats. DPPO,
    arXiv:2602.04879, section 4.4, binary approximation. No gradient, and finite also where a probability is 0 or 1.
    Raises ValueError for another name.
    """
    with torch.no_grad():
        old_N, new_N = flat.finite_logprobs(old_logprobs_N), flat.finite_logprobs(logprobs_N)
        if divergence == "tv":
            return (new_N.exp() - old_N.exp()).abs()
        if divergence == "kl":
            # 1 - p by expm1 keeps its digits where p is small; tiny keeps the logarithm finite where p is 1.
            tiny = torch.finfo(torch.float32).tiny
            old_rest_N, new_rest_N = -torch.expm1(old_N), -torch.expm1(new_N)
            rest_N = old_rest_N.clamp(min=tiny).log() - new_rest_N.clamp(min=tiny).log()
            return old_N.exp() * (old_N - new_N) + old_rest_N * rest_N
    raise ValueError(f"unknown divergence {divergence!r}: use tv or kl")


def weighted_sum(loss_N: Tensor, weights_N: Tensor, mask_N: Tensor | None = None) -> Tensor:
    """Sum of weight * loss over all tokens, float32; where `mask_N` is False nothing counts, not even a NaN."""
    return (flat.present(loss_N, mask_N).float() * flat.present(weights_N, mask_N).float()).sum()


def _inputs(tokens: LossTokens, uses_ratio: bool) -> SurrogateInput:
    """Float32, finite, detached where no gradient belongs, and empty where there is no token."""
    shape = tokens.logprobs_N.shape
    for name in ("old_logprobs_N", "advantages_N", "rows_N", "weights_N", "mask_N"):
        values = getattr(tokens, name)
        if values is not None and values.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, logprobs_N {tuple(shape)}: they have to be equal"
            )
    mask_N = tokens.mask_N
    logprobs_N = flat.finite_logprobs(flat.present(tokens.logprobs_N, mask_N))
    # Without old log-probs the ratio is 1 by construction; it still has the gradient of log pi.
    old_N = flat.present(tokens.old_logprobs_N, mask_N) if uses_ratio else logprobs_N
    old_N = flat.finite_logprobs(old_N).detach()
    difference_N = logprobs_N - old_N
    return SurrogateInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        log_ratio_N=difference_N.clamp(-flat.LARGEST_LOG_RATIO, flat.LARGEST_LOG_RATIO),
        ratio_N=flat.ratio_of(difference_N),
        advantages_N=flat.present(tokens.advantages_N, mask_N).detach().float(),
        rows_N=flat.present(tokens.rows_N, mask_N),
        samples=tokens.samples,
        mask_N=mask_N,
    )


def _clipped(
    ratio_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig, dual: float | None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of a ratio, and where its gradient is gone."""
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - config.clip.low, 1 + config.clip.high) * advantages_N
    clipped_N = bounded_N > free_N
    loss_N = torch.where(clipped_N, bounded_N, free_N)
    if dual is not None:
        # Only a negative advantage can get there: with a positive one the loss is negative.
        largest_N = dual * advantages_N.abs()
        beyond_N = loss_N > largest_N
        loss_N, clipped_N = torch.where(beyond_N, largest_N, loss_N), clipped_N | beyond_N
    return loss_N, clipped_N
