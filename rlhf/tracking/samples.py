"""The samples of a step as a Parquet file, so that a person can read what the policy wrote and what it was paid for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.tracking.folder import explain_write
from rlhf.trajectories import Columns, FinishReason, Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One sample with its texts.

    `token_ids`, `loss_mask` and `logprobs` are [T], T = prompt + response tokens, as in `Columns`: index t belongs to
    `token_ids[t]`, and log-probs (nats) are NaN where the policy didn't sample.
    """

    sample_id: str
    group_id: int
    prompt_id: str
    sample_index: int
    prompt: str
    response: str
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    weight_version: int
    engine: int
    reward: float | None
    rewards_by_function: Mapping[str, float | None]
    advantage: float | None

    @staticmethod
    def of(trajectory: Trajectory, columns: Columns, *, prompt: str, response: str) -> TrajectoryRow:
        """The row of a trajectory whose columns were fetched and whose texts are known."""
        return TrajectoryRow(
            sample_id=trajectory.sample_id,
            group_id=trajectory.group_id,
            prompt_id=trajectory.prompt_id,
            sample_index=trajectory.sample_index,
            prompt=prompt,
            response=response,
            token_ids=columns.token_ids.tolist(),
            loss_mask=columns.loss_mask.tolist(),
            logprobs=columns.logprobs.tolist(),
            finish_reason=trajectory.finish_reason,
            weight_version=trajectory.weight_version,
            engine=trajectory.engine,
            reward=trajectory.reward,
            rewards_by_function=trajectory.rewards_by_function,
            advantage=trajectory.advantage,
        )


def write_trajectories(path: Path, rows: Sequence[TrajectoryRow]) -> None:
    """Write the rows in their order; the file appears whole or not at all.

    Columns are the row's fields, with one column `reward/<function>` for each reward function of any row (null where a
    row has none). Raises `RunFolderError` when the disk is full.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "sample_id": pa.string(),
        "group_id": pa.int64(),
        "prompt_id": pa.string(),
        "sample_index": pa.int32(),
        "prompt": pa.string(),
        "response": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "weight_version": pa.int32(),
        "engine": pa.int32(),
        "reward": pa.float64(),
        "advantage": pa.float64(),
    }
    arrays: dict[str, Any] = {
        name: pa.array([getattr(row, name) for row in rows], kind) for name, kind in types.items()
    }
    for function in sorted({function for row in rows for function in row.rewards_by_function}):
        values = [row.rewards_by_function.get(function) for row in rows]
        arrays[f"reward/{function}"] = pa.array(values, pa.float64())
    aside = path.with_name(path.name + ".partial")
    with explain_write(path):
        try:
            pq.write_table(pa.table(arrays), aside, compression="zstd")
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
