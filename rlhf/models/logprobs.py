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

# Logits of one chunk: 2^25 float32 are 128 MiB, and a handful of such arrays live at a time.
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
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] of `targets_N` and entropies [N] of the distributions softmax(logits / temperature), in nats.

    Both are float32; the matrix products run in the dtype of `weight_VH`, everything after them in float32.
    Gradients flow from the log-probs to hidden states, weight and bias; the entropy carries none. `chunk_rows` bounds
    the rows whose logits exist at a time; by default it follows from `CHUNK_ELEMENTS`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs need one above 0")
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // weight_VH.shape[0])
    logprobs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, float(temperature), shape, rows
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
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, log_norm = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits, _ = _scaled_logits(hidden[chunk], weight, bias, temperature, shape)
            log_norm[chunk] = torch.logsumexp(logits, dim=-1)
            logprobs[chunk] = logits.gather(1, targets[chunk, None]).squeeze(1) - log_norm[chunk]
            # -sum p log p of terms that are none of them negative; the shorter log_norm - sum p l cancels below 0.
            log_p = logits.sub_(log_norm[chunk, None])
            entropy[chunk] = -torch.einsum("nv,nv->n", log_p.exp(), log_p).clamp_max_(0.0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm)
        ctx.temperature, ctx.shape, ctx.rows = temperature, shape, rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprobs: Tensor = grads[0]
        hidden, weight, bias, targets, log_norm = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # More than one chunk is added up in float32, whatever the weight's dtype.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        for start in range(0, len(targets), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits, slope = _scaled_logits(hidden[chunk], weight, bias, ctx.temperature, ctx.shape)
            # d logprob / d logit = onehot - p
            upstream = grad_logprobs[chunk, None]
            grad_logits = logits.sub_(log_norm[chunk, None]).exp_().mul_(-upstream)
            grad_logits.scatter_add_(1, targets[chunk, None], upstream)
            if slope is not None:
                grad_logits *= slope
            grad_logits *= ctx.shape.scale / ctx.temperature
            narrow = grad_logits.to(weight.dtype)
            grad_hidden[chunk] = narrow @ weight
            grad_weight += narrow.T @ hidden[chunk]
            if bias is not None:
                grad_bias += grad_logits.sum(0)
        bias_result = grad_bias.to(bias.dtype) if bias is not None else None
        return grad_hidden, grad_weight.to(weight.dtype), bias_result, None, None, None, None
