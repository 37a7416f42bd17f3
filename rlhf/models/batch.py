"""Samples as tensors: right-padded rows, and flat arrays over the response tokens.

Losses and scores work on the flat arrays, which hold response tokens and nothing else. A value at a prompt or padding
position, NaN included, is never read, so it can't matter (invariant 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.models.masks import TokenMask, join_masks, sample_names
from rlhf.trajectories import Columns


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B rows of L positions, and N response tokens over all rows, row by row.

    `input_ids_BL`, `position_ids_BL`, `lengths_B` (tokens before the padding); for each response token its row, its
    position t (predicted from t - 1) and its id. All int64 on one device. `mask` is None where every id could be
    sampled.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    lengths_B: Tensor
    rows_N: Tensor
    positions_N: Tensor
    targets_N: Tensor
    mask: TokenMask | None = None

    @property
    def predict_N(self) -> Tensor:
        """Where the position stands that predicts each response token, among all B x L: t - 1 of its row."""
        return self.rows_N * self.input_ids_BL.shape[1] + self.positions_N - 1

    @property
    def last_B(self) -> Tensor:
        """Where each row's last real token stands, among all B x L."""
        rows_B = torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        return rows_B * self.input_ids_BL.shape[1] + self.lengths_B - 1

    def whole(self, values_N: Tensor) -> Tensor:
        """As `PackedBatch.whole`: padded rows aren't shared, so these are all."""
        return values_N


def pad_batch(
    columns: Sequence[Columns], device: torch.device | str, sample_ids: Sequence[str] | None = None
) -> PaddedBatch:
    """Lay samples out as rows, padded on the right, and join their sampling masks.

    There is no attention mask and none is needed: attention is causal, padding comes after everything real, and
    positions count on through it, so no real token sees it and the fast causal kernels stay usable. With no samples
    the result is one row of two tokens and one response token: a pass over it makes the same collective calls as any
    other, and its loss gets weight 0.

    Raises `ValueError` for sampling masks that don't fit (see `join_masks`), naming the sample by `sample_ids`, or by
    its row.
    """
    if not columns:
        return _batch(np.zeros((1, 2), np.int64), [2], [np.array([1])], device)
    lengths = [len(c.token_ids) for c in columns]
    ids = np.zeros((len(columns), max(lengths)), dtype=np.int64)
    for row, sample in enumerate(columns):
        ids[row, : len(sample.token_ids)] = sample.token_ids
    names = sample_names(len(columns), sample_ids)
    mask = join_masks(columns, names, device)
    return _batch(ids, lengths, [np.flatnonzero(c.loss_mask) for c in columns], device, mask)


def synthetic_batch(rows: int, prompt_tokens: int, response_tokens: int, device: torch.device | str) -> PaddedBatch:
    """A batch of the given shape that holds only token 0, to find out whether the shape fits."""
    length = prompt_tokens + response_tokens
    ids_BL = np.zeros((rows, length), np.int64)
    return _batch(ids_BL, [length] * rows, [np.arange(prompt_tokens, length)] * rows, device)


def _batch(
    ids_BL: npt.NDArray[np.int64],
    lengths: Sequence[int],
    positions: Sequence[npt.NDArray[np.int64]],
    device: torch.device | str,
    mask: TokenMask | None = None,
) -> PaddedBatch:
    rows_N = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
    positions_N = np.concatenate(positions)
    row_positions_BL = np.tile(np.arange(ids_BL.shape[1]), (len(ids_BL), 1))

    def tensor(array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PaddedBatch(
        input_ids_BL=tensor(ids_BL),
        position_ids_BL=tensor(row_positions_BL),
        lengths_B=tensor(np.array(lengths, np.int64)),
        rows_N=tensor(rows_N),
        positions_N=tensor(positions_N),
        targets_N=tensor(ids_BL[rows_N, positions_N]),
        mask=mask,
    )


def flatten(
    columns: Sequence[Columns], values: Sequence[npt.NDArray[np.float32]], device: torch.device | str
) -> Tensor:
    """The response tokens' entries of per-token arrays [T], as one float32 tensor [N] in the order of `pad_batch`."""
    parts = [value[sample.loss_mask] for sample, value in zip(columns, values, strict=True)]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)


def unflatten(columns: Sequence[Columns], values_N: Tensor) -> list[npt.NDArray[np.float32]]:
    """The inverse of `flatten`: per-token float32 arrays [T], NaN where a token is not of the response."""
    flat = values_N.detach().float().cpu().numpy()
    arrays, start = [], 0
    for sample in columns:
        array = np.full(len(sample.token_ids), np.nan, dtype=np.float32)
        count = int(sample.loss_mask.sum())
        array[sample.loss_mask] = flat[start : start + count]
        arrays.append(array)
        start += count
    return arrays
