"""Replay of an engine's sampling mask: which token ids it could sample at each response token of a batch.

Top-k, top-p and a minimal length change the distribution that is sampled from. A log-prob of the trainer is comparable
to the engine's only when it is of the same distribution, so the ids that the engine left out are left out here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.trajectories import Columns, SamplingMask


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The sampling mask of a flat batch of N response tokens.

    For token n the ids `token_ids[offsets_N1[n]:offsets_N1[n + 1]]` are the only ones that could be sampled (`allowed`
    True), or the only ones that could not (False). Both int64; `token_ids` lies beside the logits, `offsets_N1`
    [N + 1] stays on the CPU, where it cuts slices.
    """

    offsets_N1: Tensor
    token_ids: Tensor
    allowed: bool

    def apply_(self, logits: Tensor, start: int) -> Tensor:
        """Set logits [n, V], of tokens start to start + n - 1, to -inf in place for ids that could not be sampled."""
        cuts = self.offsets_N1[start : start + len(logits) + 1]
        ids = self.token_ids[int(cuts[0]) : int(cuts[-1])]
        rows = torch.repeat_interleave(torch.arange(len(logits)), cuts.diff()).to(logits.device)
        if not self.allowed:
            logits[rows, ids] = -torch.inf
            return logits
        kept = logits[rows, ids]
        logits.fill_(-torch.inf)
        logits[rows, ids] = kept
        return logits

    def select(self, tokens_M: Tensor) -> TokenMask:
        """The mask of those tokens alone, in their order."""
        tokens = tokens_M.cpu()
        starts, counts = self.offsets_N1[tokens], self.offsets_N1.diff()[tokens]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        kept = torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts - offsets[:-1], counts)
        return TokenMask(offsets, self.token_ids[kept.to(self.token_ids.device)], self.allowed)


def sample_names(count: int, sample_ids: Sequence[str] | None) -> list[str]:
    """What messages call the samples of a batch: by their ids, or by their rows where no ids are given."""
    return [f"row {row}" for row in range(count)] if sample_ids is None else [f"sample {i}" for i in sample_ids]


def join_masks(columns: Sequence[Columns], names: Sequence[str], device: torch.device | str) -> TokenMask | None:
    """One mask for the response tokens of these samples, in their order; None when no sample has one.

    A sample without a mask beside samples that exclude ids excludes none. Raises `ValueError` with the sample's name
    when the samples' masks are of both kinds, when one lacks a mask beside samples with allowed ids, when a mask is for
    another number of tokens, and when it leaves out a token that was sampled: then engine and trainer disagree.
    """
    kinds = {sample.sampling_mask.allowed for sample in columns if sample.sampling_mask is not None}
    if not kinds:
        return None
    allowed = True in kinds
    offsets, token_ids, total = [np.zeros(1, np.int64)], [], 0
    for sample, name in zip(columns, names, strict=True):
        targets = sample.token_ids[sample.loss_mask]
        mask = sample.sampling_mask
        if mask is None and not allowed:
            mask = SamplingMask(np.zeros(len(targets) + 1, np.int64), np.zeros(0, np.int32), allowed=False)
        if mask is None or mask.allowed != allowed:
            held = "no sampling mask" if mask is None else "a sampling mask of excluded ids"
            raise ValueError(f"{name} has {held}, others of the batch have one of allowed ids: a batch has one kind")
        _check(mask, targets, name)
        offsets.append(mask.offsets[1:].astype(np.int64) + total)
        token_ids.append(mask.token_ids.astype(np.int64))
        total += len(mask.token_ids)
    ids = torch.from_numpy(np.concatenate(token_ids)).to(device)
    return TokenMask(torch.from_numpy(np.concatenate(offsets)), ids, allowed)


def _check(mask: SamplingMask, targets: npt.NDArray[np.int32], name: str) -> None:
    """Refuse a mask that doesn't fit the tokens that were sampled."""
    counts = np.diff(mask.offsets)
    if len(counts) != len(targets) or mask.offsets[0] != 0 or mask.offsets[-1] != len(mask.token_ids):
        raise ValueError(
            f"{name}: its sampling mask is for {len(counts)} tokens and {len(mask.token_ids)} ids, of which offsets "
            f"cover {mask.offsets[0]} to {mask.offsets[-1]}; its response has {len(targets)} tokens"
        )
    rows = np.repeat(np.arange(len(targets)), counts)
    listed = np.zeros(len(targets), dtype=np.bool_)
    listed[rows[mask.token_ids == targets[rows]]] = True
    wrong = np.flatnonzero(listed != mask.allowed)
    if len(wrong):
        raise ValueError(
            f"{name}: response token {wrong[0]} is {targets[wrong[0]]}, which its sampling mask leaves out; the engine "
            "sampled from another distribution than the trainer would replay"
        )
