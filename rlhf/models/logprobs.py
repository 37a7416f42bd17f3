"""Log-probs and entropy of chosen tokens without a tokens-by-vocabulary array of the whole batch.

The output head is applied to the hidden states that predict response tokens only, a chunk of rows at a time, and the
backward pass computes each chunk's logits again instead of keeping them. So the memory for logits is bounded by
`CHUNK_ELEMENTS`, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.models.masks import TokenMask

# Logits of one chunk: 2^25 float32 are 128 MiB, and at most three such arrays live at a time (four with a soft cap).
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How an architecture turns head outputs into logits: `softcap` (Gemma) after `scale` (Cohere, Granite)."""

    softcap: float | None = None
    scale: float = 1.0

    @staticmethod
    def of(config: Any) -> HeadShape:
        """Read it from a transformers configuration."""
        text = config.get_text_config()
        softcap = getattr(text, "final_logit_softcapping", None)
        scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
        return HeadShape(softcap=float(softcap) if softcap else None, scale=scale)


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    shape: HeadShape,
    chunk_rows: int | None = None,
    mask: TokenMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] of `targets_N` and entropies [N] of the distributions softmax(logits / temperature), in nats.

    With a `mask` the log-probs are of the distribution over the ids that could be sampled; the entropies are of the
    full one in any case, so that an entropy bonus also acts on what top-k or top-p leave out.

    Both are float32; the matrix products run in the dtype of `weight_VH`, everything after them in float32.
    Gradients flow from both to hidden states, weight and bias. `chunk_rows` bounds the rows whose logits exist at a
    time; by default it follows from `CHUNK_ELEMENTS`. Raises `ValueError` for a temperature that is not above 0, and
    for a target that could not be sampled.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs need one above 0")
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // weight_VH.shape[0])
    logprobs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, float(temperature), shape, rows, mask
    )
    if mask is not None and torch.isneginf(logprobs).any():
        token = int(torch.isneginf(logprobs).nonzero()[0])
        raise ValueError(
            f"response token {token} of the batch is {int(targets_N[token])}, which its sampling mask leaves out"
        )
    return logprobs, entropy


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, shape: HeadShape
) -> tuple[Tensor, Tensor | None]:
    """Float32 logits / temperature of a chunk, and the derivative of the soft cap where there is one."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if shape.scale != 1.0:
        logits *= shape.scale
    slope = None
    if shape.softcap is not None:
        bounded = torch.tanh_(logits.div_(shape.softcap))
        slope = 1 - bounded.square()
        logits = bounded.mul_(shape.softcap)
    if temperature != 1.0:
        logits /= temperature
    return logits, slope


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        shape: HeadShape,
        rows: int,
        mask: TokenMask | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, full_norm = torch.empty_like(logprobs), torch.empty_like(logprobs)
        # The norm of the distribution that was sampled from; without a mask that is the full one.
        norm = full_norm if mask is None else torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits, _ = _scaled_logits(hidden[chunk], weight, bias, temperature, shape)
            highest = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(highest)
            terms = shifted.exp()
            total = terms.sum(-1)
            kept = log_total = total.log()
            full_norm[chunk] = highest.squeeze(1) + log_total
            # -sum p log p as two terms, neither of them negative: the highest logit alone makes the total 1.
            entropy[chunk] = log_total - torch.einsum("nv,nv->n", terms, shifted) / total
            if mask is not None:
                kept = torch.logsumexp(mask.apply_(shifted, start), dim=-1)
                norm[chunk] = highest.squeeze(1) + kept
            logprobs[chunk] = shifted.gather(1, targets[chunk, None]).squeeze(1) - kept
            # Or they would be there still when the next chunk's logits are made.
            del logits, shifted, terms
        ctx.save_for_backward(hidden, weight, bias, targets, norm, full_norm, entropy)
        ctx.temperature, ctx.shape, ctx.rows, ctx.mask = temperature, shape, rows, mask
        # An output that the loss doesn't use comes back as None and not as zeros, and costs nothing then.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, norm, full_norm, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        # More than one chunk is added up in float32, whatever the weight's dtype. A frozen head costs nothing.
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if ctx.needs_input_grad[2]:
            grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        for start in range(0, len(targets), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits, slope = _scaled_logits(hidden[chunk], weight, bias, ctx.temperature, ctx.shape)
            of_entropy = None
            if grad_entropy is not None:
                of_entropy = _entropy_gradient(logits - full_norm[chunk, None], entropy[chunk], grad_entropy[chunk])
            if grad_logprobs is None:
                grad_logits = logits.zero_() if of_entropy is None else of_entropy
            else:
                if ctx.mask is not None:
                    ctx.mask.apply_(logits, start)
                grad_logits = _logprob_gradient_(logits, norm[chunk], targets[chunk], grad_logprobs[chunk])
                if of_entropy is not None:
                    grad_logits += of_entropy
            if slope is not None:
                grad_logits *= slope
            if ctx.shape.scale != ctx.temperature:
                grad_logits *= ctx.shape.scale / ctx.temperature
            narrow = grad_logits.to(weight.dtype)
            grad_hidden[chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            del logits, slope, of_entropy, grad_logits, narrow
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        of_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, of_weight, of_bias, *[None] * 5


def _logprob_gradient_(logits: Tensor, norm: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    """d logprob / d logit = onehot - p, times the incoming gradient; in the memory of `logits`."""
    gradient = logits.sub_(norm[:, None]).exp_().mul_(-upstream[:, None])
    return gradient.scatter_add_(1, targets[:, None], upstream[:, None])


def _entropy_gradient(log_p: Tensor, entropy: Tensor, upstream: Tensor) -> Tensor:
    """d entropy / d logit = -p (log p + entropy), times the incoming gradient."""
    return log_p.exp().mul_(log_p.add_(entropy[:, None])).mul_(-upstream[:, None])
