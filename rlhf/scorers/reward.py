"""The reward model scorer: a frozen sequence-classification model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.schema import Config
from rlhf.scorers.base import Scorer, ScorerSettings
from rlhf.trajectories import Columns

if TYPE_CHECKING:
    from torch import nn

    from rlhf.models.arrangement import Batch


class RewardModelScorer(Scorer[float]):
    """The score of each whole sample, prompt and response, read at its last token: a float by sample id.

    It reads the ids that were sampled, so its tokenizer has to be the policy's. A score that is not finite is passed
    on as it is.
    """

    def __init__(self, config: Config, rank: int, world_size: int, device: Literal["cpu", "cuda"] = "cpu") -> None:
        own = config.reward.model
        if own is None:
            raise ValueError("reward.model is absent: there is no reward model to score with")
        self._own = own
        settings = ScorerSettings("reward_model", own.dtype, own.sharded, own.deadline_s)
        super().__init__(config, rank, world_size, device, settings)

    def _load(self) -> nn.Module:
        from rlhf.models.reward import load_reward_model

        return load_reward_model(self._own.path, self._own.dtype)

    def _evaluate(self, model: Any, batch: Batch, rows: Sequence[Columns]) -> Sequence[float]:
        scores_B: list[float] = model(batch).tolist()
        # An empty batch is padded to one row, whose score is nobody's.
        return scores_B[: len(rows)]
