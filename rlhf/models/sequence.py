"""Ulysses sequence parallelism: ranks of a group share one packed row, each with a piece of its tokens.

After Jacobs et al. (arXiv:2309.14509). A rank's layers see its own tokens. Attention needs all of them, but each head
by itself: before it the ranks trade tokens of all heads for all tokens of some heads, and after it they trade back.

Invariants
- Outside attention a rank computes its own piece alone, and in attention the whole row for its own heads alone.
- What the ranks compute of a row is what one rank would compute of it, and the gradients of their parameters add up to
  that rank's.
- After `assemble` every rank has the same outputs for the whole row, bit for bit, and so the same loss. Backward each
  takes the gradient of those that it computed itself: nothing is counted twice, and nothing is divided.
- The ranks make the same exchanges in the same order, whatever their pieces hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.models.attention import Block, PackedLayout


class SequenceGroup:
    """The ranks that share rows, as one of them sees it: `size` of them, of which it is number `rank`."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def to_heads(self, *states_1HLD: Tensor) -> list[Tensor]:
        """Trade all heads of this piece for some heads of the whole row, in one exchange.

        Each [1, H, L, D] becomes [1, H / size, size x L, D], for its own H and D; tokens in the order of the ranks, and
        of the heads those that are this rank's by number. The size has to divide every H.
        """
        sent = torch.cat([states.reshape(self.size, -1) for states in states_1HLD], 1)
        sizes = [states.numel() // self.size for states in states_1HLD]
        received: Sequence[Tensor] = torch.split(self._exchange(sent), sizes, 1)
        whole = []
        for states, part in zip(states_1HLD, received, strict=True):
            _, heads, tokens, head_dim = states.shape
            pieces = part.reshape(self.size, heads // self.size, tokens, head_dim)
            whole.append(pieces.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, head_dim))
        return whole

    def to_tokens(self, output_1LHD: Tensor) -> Tensor:
        """The way back: [1, size x L, H / size, D], some heads of the whole row, becomes [1, L, H, D]."""
        _, tokens, heads, head_dim = output_1LHD.shape
        parts = self._exchange(output_1LHD.reshape(self.size, tokens // self.size, heads, head_dim))
        return parts.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, head_dim)

    def assemble(self, values_M: Tensor, own_M: Tensor, total: int) -> Tensor:
        """All `total` values of a row, from those that each rank computed: its M stand at the places `own_M`."""
        whole: Tensor = _Assemble.apply(values_M, own_M, total, self._group)  # type: ignore[no-untyped-call]
        return whole

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part p of the first axis goes to rank p, and part p of the result came from there."""
        received: Tensor = _Exchange.apply(parts.contiguous(), self._group)  # type: ignore[no-untyped-call]
        return received


def join_sequence_group(rank: int, world_size: int, size: int, deadline_s: float) -> SequenceGroup | None:
    """Let every `size` consecutive ranks of the process group share their rows; None where each has rows of its own.

    A collective call of all ranks. What they exchange later waits for the ranks of one group, for at most `deadline_s`
    seconds.
    """
    if size == 1:
        return None
    timeout = timedelta(seconds=deadline_s)
    group, _ = dist.new_subgroups(group_size=size, timeout=timeout)  # type: ignore[no-untyped-call]
    assert group is not None, f"rank {rank} of {world_size} is in no group of {size}"
    return SequenceGroup(group, rank % size, size)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Exchange(torch.autograd.Function):
    """An exchange of equal parts, whose gradient goes the same way: what was sent from i to j comes from j to i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0].contiguous(), ctx.group), None


class _Assemble(torch.autograd.Function):
    """Sums of one rank's value and the others' zeros, which are exact."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(total)
        whole[own] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (own,) = ctx.saved_tensors
        return grads[0][own], None, None, None


class SequenceLayout(PackedLayout):
    """The layout of a whole row, for attention that is called with one rank's piece of it."""

    def __init__(self, blocks: Sequence[Block], group: SequenceGroup) -> None:
        super().__init__(blocks)
        self._group = group

    def attend(
        self, query_1HLD: Tensor, key_1KLD: Tensor, value_1KLD: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """As `PackedLayout.attend`, with L the tokens of the piece."""
        query, key, value = self._group.to_heads(query_1HLD, key_1KLD, value_1KLD)
        return self._group.to_tokens(super().attend(query, key, value, scale, window))


@dataclass(frozen=True, slots=True)
class Piece:
    """That a batch is one rank's piece of a row with `total` response tokens, of which `own_M` are predicted in it."""

    group: SequenceGroup
    own_M: Tensor
    total: int
