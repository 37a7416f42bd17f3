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

from rlhf.trajectories import Columns


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B rows of L positions, and N response tokens over all rows, row by row.

    `input_ids_BL`, `position_ids_BL`; for each response token its row, its position t (predicted from t - 1) and its
    id. All int64 on one device.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    rows_N: Tensor
    positions_N: Tensor
    targets_N: Tensor


def pad_batch(columns: Sequence[Columns], device: torch.device | str) -> PaddedBatch:
    """Lay samples out as rows, padded on the right.

    There is no attention mask and none is needed: attention is causal, padding comes after everything real, and
    positions count on through it, so no real token sees it and the fast causal kernels stay usable. With no samples
    the result is one row of two tokens and one response token: a pass over it makes the same collective calls as any
    other, and its loss gets weight 0.
    """
    if not columns:
        return _batch(np.zeros((1, 2), np.int64), [np.array([1])], device)
    ids = np.zeros((len(columns), max(len(c.token_ids) for c in columns)), dtype=np.int64)
    for row, sample in enumerate(columns):
        ids[row, : len(sample.token_ids)] = sample.token_ids
    return _batch(ids, [np.flatnonzero(c.loss_mask) for c in columns], device)


def synthetic_batch(rows: int, prompt_tokens: int, response_tokens: int, device: torch.device | str) -> PaddedBatch:
    """A batch of the given shape that holds only token 0, to find out whether the shape fits."""
    length = prompt_tokens + response_tokens
    return _batch(np.zeros((rows, length), np.int64), [np.arange(prompt_tokens, length)] * rows, device)


def _batch(
    ids_BL: npt.NDArray[np.int64], positions: Sequence[npt.NDArray[np.int64]], device: torch.device | str
) -> PaddedBatch:
    rows_N = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
    positions_N = np.concatenate(positions)
    row_positions_BL = np.tile(np.arange(ids_BL.shape[1]), (len(ids_BL), 1))
    arrays = (ids_BL, row_positions_BL, rows_N, positions_N, ids_BL[rows_N, positions_N])
    return PaddedBatch(*(torch.from_numpy(array).to(device) for array in arrays))


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
