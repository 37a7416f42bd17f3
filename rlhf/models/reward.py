"""A reward model: one score for a whole sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlhf.models.arrangement import Batch
from rlhf.models.backbone import hidden_states
from rlhf.models.load import load_classifier


class RewardModel(nn.Module):
    """Backbone, then the score head on the last real token of each row.

    Where that is follows from the sequence's length and never from its ids: an end-of-sequence token may be the padding
    token, be missing, or be inside the prompt.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> Tensor:
        """Scores [B], float32, of the rows' sequences."""
        scores_B: Tensor = self.lm.score(hidden_states(self.lm, batch)[batch.last_B])
        return scores_B


def load_reward_model(path: str, dtype: str) -> RewardModel:
    """Load the sequence-classification checkpoint at `path` in `dtype`, on the CPU.

    Raises `ValueError` with the path and the remedy when the head or any other weight is missing and would be random,
    or when the head has more than one output.
    """
    return RewardModel(load_classifier(path, dtype, "checkpoint"))
