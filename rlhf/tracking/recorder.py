"""The actor that writes `trajectories/`: it fetches columns and makes texts of them, so that the driver never does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.cluster.wait import wait_all
from rlhf.tracking.samples import TrajectoryRow, write_trajectories
from rlhf.trajectories import Group

_COLUMNS_DEADLINE_S = 120.0


class TrajectoryRecorder:
    """Writes one Parquet file a step, beside the learner's update."""

    def __init__(self, tokenizer_path: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
        self._folder = folder

    async def write(self, step: int, groups: Sequence[Group]) -> None:
        """Write every sample of the step, in the order of the draws, with the rewards and advantages it got."""
        samples = [(group.draw.prompt.text, t) for group in groups for t in group.trajectories]
        columns = await wait_all(
            [t.columns for _, t in samples], what="sampled ids for trajectories/", deadline_s=_COLUMNS_DEADLINE_S
        )
        rows = [
            TrajectoryRow.of(trajectory, column, prompt=prompt, response=self._text(column))
            for (prompt, trajectory), column in zip(samples, columns, strict=True)
        ]
        write_trajectories(self._folder / f"step-{step:06d}.parquet", rows)

    def _text(self, columns: Any) -> str:
        text: str = self._tokenizer.decode(columns.token_ids[columns.loss_mask].tolist(), skip_special_tokens=False)
        return text
