"""The Ray actor that scores groups: it fetches the sampled ids, makes texts of them, and runs the pool.

Invariants
- A response's text is decoded from the ids that the policy sampled (where the loss mask is set), with special tokens
  left out: no `<eos>` or padding reaches a function, and special tokens of one's own are in `response_ids` only.
- Scores come back in the order of the trajectories that were asked about, whatever else is being scored.
- The event loop is never blocked by a reward function, so groups are scored while others wait.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.cluster.wait import wait_all
from rlhf.config.schema import RewardConfig
from rlhf.rewards.pool import RewardPool
from rlhf.rewards.types import RewardInput, ScoreResult
from rlhf.tracking.spans import recorder, set_role, span
from rlhf.trajectories import Columns, Prompt, Trajectory

# A sample's columns are some hundred kilobytes; what isn't here by then sits on a node that is gone.
COLUMNS_DEADLINE_S = 120.0


class RewardActor:
    """Scores one group a call; calls may overlap. `extra` and `base_dir` are those of `RewardPool`."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer_path: str,
        extra: Mapping[str, bytes] | None = None,
        base_dir: str | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        set_role("reward")
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self._pool = RewardPool(config, extra, base_dir)
        self._pool.start()

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], step: int | None = None, parent: str | None = None
    ) -> ScoreResult:
        """Score the trajectories of one prompt; raises `RewardError` as `reward.on_error` says."""
        with span("score", step, parent):
            columns = await wait_all(
                [_columns_of(trajectory) for trajectory in trajectories],
                what=f"sampled ids of prompt {prompt.prompt_id!r} for the reward",
                deadline_s=COLUMNS_DEADLINE_S,
            )
            inputs = [self._input(prompt, t, c) for t, c in zip(trajectories, columns, strict=True)]
            scores = await self._pool.score(
                inputs, prompt_id=prompt.prompt_id, sample_indices=[t.sample_index for t in trajectories]
            )
        return ScoreResult(scores, recorder.drain())

    def _input(self, prompt: Prompt, trajectory: Trajectory, columns: Columns) -> RewardInput:
        ids = columns.token_ids[columns.loss_mask].tolist()
        return RewardInput(
            prompt=prompt.text,
            response=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            prompt_ids=prompt.token_ids,
            response_ids=tuple(ids),
            fields=prompt.fields,
            finish_reason=trajectory.finish_reason,
        )

    async def ping(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


def _columns_of(trajectory: Trajectory) -> Any:
    if trajectory.columns is None:
        raise ValueError(f"sample {trajectory.sample_id} has no columns to score")
    return trajectory.columns
