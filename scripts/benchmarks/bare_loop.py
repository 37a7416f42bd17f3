"""A training loop of plain PyTorch: the peer that `learner.py` compares with.

The model is transformers' own with `sdpa` attention. A micro-batch is one of four layouts:

- `plain`   a rectangle as in a textbook: samples in the order of the batch, each with its own prompt and filled up on
            the right to the longest, with an attention mask, and logits at every position.
- `padded`  a better rectangle: samples sorted by length, so that little is filled up; no mask, since under a causal one
            nobody sees what comes later; and logits only where a response token is predicted.
- `mask`    one packed row without any padding, with a block-diagonal causal mask, and logits as above.
- `split`   the same row, with one causal call of attention for each sequence: nothing is computed that a mask hides.

Weights and gradients are in the compute dtype, and AdamW works on float32 masters, whose gradients are cast once an
optimizer step. It is meant to be fast: nothing is checked, nothing but the norm is measured, and no activation is
computed again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.batching import CostModel, LearnerSample, MicroBatch, SampleLength, plan, plan_packed

Layout = Literal["plain", "padded", "mask", "split"]
RECTANGLES: tuple[Layout, ...] = ("plain", "padded")
SPLIT_ATTENTION = "one_call_a_sequence"
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Timed:
    """An update: seconds of forward and backward, of all of it, and the gradient's norm."""

    passes: float
    seconds: float
    grad_norm: float


def pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Sequences as a rectangle [B, L], filled up with token 0 on the right."""
    tensors = [torch.tensor(sequence) for sequence in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def in_order(lengths: Sequence[SampleLength], max_tokens: int) -> list[MicroBatch]:
    """Cut samples, in their order, into rectangles of at most `max_tokens`; one that is longer stands alone."""
    rows: list[list[SampleLength]] = [[]]
    for length in lengths:
        longest = max(other.tokens for other in [*rows[-1], length])
        if rows[-1] and longest * (len(rows[-1]) + 1) > max_tokens:
            rows.append([])
        rows[-1].append(length)
    return [MicroBatch(tuple(row)) for row in rows]


def block_mask(lengths: Sequence[int]) -> Tensor:
    """What each token of a packed row may see, bool [L, L]: its own sequence up to itself."""
    sequence_L = torch.repeat_interleave(torch.tensor(lengths))
    return (sequence_L[:, None] == sequence_L[None, :]).tril()


def split_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, lengths: Sequence[int], **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, query [1, H, L, D] to [1, L, H, D]: one causal call for each sequence."""
    parts = zip(*(states.split(list(lengths), dim=2) for states in (query, key, value)), strict=True)
    attended = [
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=True)
        for q, k, v in parts
    ]
    return torch.cat(attended, dim=2).transpose(1, 2), None


class BareLoop:
    """The model, its optimizer, and updates on all threads of this process."""

    def __init__(self, model: Path, dtype: str, layout: Layout, max_tokens: int, learning_rate: float) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, sdpa_mask)
        self.attention = SPLIT_ATTENTION if layout == "split" else "sdpa"
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation=self.attention
        )
        self._layout = layout
        self._max_tokens = max_tokens
        self._weights: list[Tensor] = list(self.model.parameters())
        masters = self._weights if dtype == "float32" else [w.detach().float() for w in self._weights]
        self._masters = masters
        self._optimizer = torch.optim.AdamW(masters, lr=learning_rate, weight_decay=0.0, fused=True)

    def micro_batches(self, samples: Sequence[LearnerSample]) -> list[MicroBatch]:
        """The samples in as few micro-batches as the cap allows, as this layout lays them out."""
        # Each with its own prompt, whatever its group.
        lengths = [SampleLength(s.sample_id, index, s.total_tokens, s.prompt_tokens) for index, s in enumerate(samples)]
        if self._layout == "plain":
            return in_order(lengths, self._max_tokens)
        if self._layout == "padded":
            found = plan(lengths, 1, 1, self._max_tokens)
        else:
            found = plan_packed(lengths, 1, 1, self._max_tokens, CostModel(1.0, 0.0))
        return [micro_batch for micro_batch in found.minibatches[0].ranks[0] if micro_batch.samples]

    def update(self, samples: Sequence[LearnerSample]) -> Timed:
        """One optimizer step on the policy gradient of these samples, a mean over response tokens."""
        by_id = {sample.sample_id: sample for sample in samples}
        started = time.perf_counter()
        count = sum(sample.response_tokens for sample in samples)
        for micro_batch in self.micro_batches(samples):
            members = [by_id[sample_id] for sample_id in micro_batch.sample_ids]
            (self._loss(members) / count).backward()
        middle = time.perf_counter()
        norm = self._step()
        return Timed(middle - started, time.perf_counter() - started, norm)

    def _loss(self, samples: Sequence[LearnerSample]) -> Tensor:
        """The sum of -advantage x log-prob over the response tokens of a micro-batch."""
        ids: list[Any] = [sample.columns.token_ids.tolist() for sample in samples]  # type: ignore[union-attr]
        hidden_PH = self._hidden(ids)
        rows = [max(map(len, ids))] * len(ids) if self._layout in RECTANGLES else list(map(len, ids))
        starts = [sum(rows[:index]) for index in range(len(rows))]
        predict, targets, advantages = [], [], []
        for start, sample, tokens in zip(starts, samples, ids, strict=True):
            first, end = sample.prompt_tokens, sample.total_tokens
            predict += range(start + first - 1, start + end - 1)
            targets += tokens[first:]
            scores: Any = sample.scores["advantages"]
            advantages += scores[sample.sample_id][first:].tolist()
        head = self.model.get_output_embeddings()
        logits = (head(hidden_PH)[predict] if self._layout == "plain" else head(hidden_PH[predict])).float()
        losses = functional.cross_entropy(logits, torch.tensor(targets), reduction="none")
        return (torch.tensor(advantages) * losses).sum()

    def _hidden(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Last hidden states [P, H] of all positions of the micro-batch, rows one after the other."""
        lengths = [len(tokens) for tokens in ids]
        if self._layout in RECTANGLES:
            inputs: dict[str, Any] = {"input_ids": pad(ids)}
        else:
            inputs = {
                "input_ids": torch.tensor([token for tokens in ids for token in tokens])[None],
                "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            }
        if self._layout == "plain":
            inputs["attention_mask"] = pad([[1] * length for length in lengths])
        if self._layout == "mask":
            inputs["attention_mask"] = block_mask(lengths)[None, None]
        if self._layout == "split":
            inputs["lengths"] = lengths
        output = self.model.get_decoder()(**inputs, use_cache=False)
        hidden: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden

    @torch.no_grad()
    def _step(self) -> float:
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not self._weights:
            torch._foreach_copy_(self._weights, self._masters)
        return float(norm)
