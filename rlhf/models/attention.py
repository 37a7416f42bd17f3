"""Attention over a packed row: many samples behind one another, each prompt once for all its samples.

Invariants
- A token attends to tokens of its own block alone: to those of the shared prompt, and to those of its own sample, at
  positions up to its own, and in a layer with a sliding window less than that window before it.
- Positions count within a sample, from the start of its prompt, and so do windows; where a token stands in the row
  doesn't matter.
- No arithmetic joins a token with one that it doesn't attend to, but for later tokens of its own sample: what another
  sample holds, NaN included, can't matter.
- Masks are made once for a row, and every layer uses them again.
- Rows without a layout go through transformers' SDPA attention, with the mask that transformers makes for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# What `attn_implementation` has to be for a model that is given packed rows.
PACKED_ATTENTION = "rlhf_packed"

# A masked kernel computes every pair of query and key, so rows of a sample are cut where that would be too many.
QUERY_CHUNK = 1024

# Features that an architecture may ask its attention for and that packed rows don't have.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive tokens of a row: `shared` of them first, then `own[i]` of sample i after each other.

    The shared ones are the prompt of all these samples. A sample that shares nothing is a block of `shared` tokens.
    """

    shared: int
    own: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the row that are this block's."""
        return self.shared + sum(self.own)


class PackedLayout:
    """Which token of a packed row belongs to what, and attention by that.

    It travels as a keyword argument from the backbone down to its attention, so a layer that activation checkpointing
    runs again sees the same one.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self._masks: dict[object, Any] = {}

    def attend(
        self, query_1HLD: Tensor, key_1KLD: Tensor, value_1KLD: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention outputs [1, L, H, D] of H query heads over K key-value heads, H a multiple of K."""
        if query_1HLD.device.type == "cuda":
            return self._attend_flex(_compiled_flex(), query_1HLD, key_1KLD, value_1KLD, scale, window)
        sizes = [block.tokens for block in self.blocks]
        # In float32 whatever the dtype: torch's CPU kernel takes four times as long for the backward pass of a short
        # sequence in bfloat16, and longer at any length (docs/performance.md).
        # One split of the whole row: its backward pass is one concatenation, that of each slice a row of zeros.
        parts = (_split(tensor.float(), sizes) for tensor in (query_1HLD, key_1KLD, value_1KLD))
        outputs = list[Tensor]()
        for block, query, key, value in zip(self.blocks, *parts, strict=True):
            outputs += self._attend_block(block, query, key, value, scale, window)
        return torch.cat(outputs, 2).transpose(1, 2).to(query_1HLD.dtype, memory_format=torch.contiguous_format)

    def _attend_block(
        self, block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Iterator[Tensor]:
        """Outputs of the shared tokens, then of each sample's own, which have the shared keys before their own."""
        sizes = [block.shared, *block.own]
        keys, values = _split(key, sizes), _split(value, sizes)
        for part, own in enumerate(_split(query, sizes)):
            if own.shape[2] == 0:
                continue
            context = (keys[0], values[0])
            if part > 0 and block.shared > 0:
                context = (torch.cat([keys[0], keys[part]], 2), torch.cat([values[0], values[part]], 2))
            elif part > 0:
                context = (keys[part], values[part])
            yield from self._attend_sample(own, *context, scale, window)

    def _attend_sample(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Iterator[Tensor]:
        """Outputs of a sample's last tokens, given the keys of all its tokens."""
        queries, tokens = query.shape[2], key.shape[2]
        if queries == tokens and (window is None or window >= tokens):
            yield _sdpa(query, key, value, scale, None)
            return
        first = tokens - queries
        for chunk in _split(query, QUERY_CHUNK):
            end = first + chunk.shape[2]
            start = 0 if window is None else max(0, first - window + 1)
            mask = self._sample_mask(chunk, end - start, None if window is None or window >= end else window)
            yield _sdpa(chunk, key[:, :, start:end], value[:, :, start:end], scale, mask)
            first = end

    def _sample_mask(self, query: Tensor, keys: int, window: int | None) -> Tensor:
        """Additive mask [queries, keys] of the last tokens of one sample."""
        cached = (query.shape[2], keys, window, query.dtype, query.device)
        if cached not in self._masks:
            positions = torch.arange(keys, device=query.device)
            distance = positions[keys - query.shape[2] :, None] - positions
            mask = torch.zeros(distance.shape, dtype=query.dtype, device=query.device)
            self._masks[cached] = mask.masked_fill_(~_near(distance, window), -torch.inf)
        found: Tensor = self._masks[cached]
        return found

    def _attend_flex(
        self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """The same by FlexAttention, which skips the tiles of the row in which nothing is visible."""
        from torch.nn.attention.flex_attention import create_block_mask

        cached = ("flex", window, query.device)
        if cached not in self._masks:
            length = query.shape[2]
            visible = self._mask_mod(query.device, window)
            self._masks[cached] = create_block_mask(visible, None, None, length, length, device=query.device)
        grouped = query.shape[1] != key.shape[1]
        output: Tensor = kernel(query, key, value, block_mask=self._masks[cached], scale=scale, enable_gqa=grouped)
        return output.transpose(1, 2).contiguous()

    def _mask_mod(self, device: torch.device, window: int | None) -> Any:
        """The row's visibility as a function of two places in it."""
        coordinates = [block_coordinates(block, device) for block in self.blocks]
        sizes = torch.tensor([block.tokens for block in self.blocks], device=device)
        blocks_L = torch.repeat_interleave(torch.arange(len(self.blocks), device=device), sizes)
        samples_L = torch.cat([samples for samples, _ in coordinates])
        positions_L = torch.cat([positions for _, positions in coordinates])

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del batch, head
            shared_or_own = (samples_L[key] < 0) | (samples_L[key] == samples_L[query])
            near = _near(positions_L[query] - positions_L[key], window)
            return (blocks_L[query] == blocks_L[key]) & shared_or_own & near

        return visible


def block_coordinates(block: Block, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Sample [L] (-1 for what all samples share) and position [L] of a block's tokens, int64."""
    sizes = torch.tensor([block.shared, *block.own], device=device)
    samples_L = torch.repeat_interleave(torch.arange(-1, len(block.own), device=device), sizes)
    parts = [torch.arange(block.shared), *(torch.arange(block.shared, block.shared + own) for own in block.own)]
    return samples_L, torch.cat(parts).to(device)


def _split(states_1HLD: Tensor, sizes: int | list[int]) -> Sequence[Tensor]:
    """Parts of a row, along its tokens."""
    parts: Sequence[Tensor] = torch.split(states_1HLD, sizes, 2)
    return parts


def _near(distance: Tensor, window: int | None) -> Tensor:
    """Whether a key so many positions before its query may be seen."""
    return (distance >= 0) & (distance < window) if window is not None else distance >= 0


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    causal = mask is None and query.shape[2] > 1
    return scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls: query [B, H, L, D], key and value [B, K, L, D], to [B, L, H, D].

    With `packed` the row's layout decides alone what is visible. Raises `ValueError` for features that packed rows
    don't have: attention that is not causal, dropout, logit caps, sinks, position biases and caches.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    asked = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if dropout > 0:
        asked.append("dropout")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        asked.append("attention in both directions")
    if asked:
        raise ValueError(f"{type(module).__name__} uses {', '.join(asked)}, which packed rows don't have")
    return packed.attend(query, key, value, scaling, sliding_window), None


def register() -> None:
    """Make `PACKED_ATTENTION` known to transformers; to be called before a model is loaded with it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, sdpa_mask)
