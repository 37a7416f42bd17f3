"""A value model: what return to expect at each response token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlhf.models.arrangement import Batch
from rlhf.models.backbone import hidden_states
from rlhf.models.load import Head, load_classifier


class ValueModel(nn.Module):
    """Backbone, then the score head on the positions that predict response tokens.

    `lm` is a transformers sequence-classification model, so that what it saves can be loaded as one.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> Tensor:
        """Values [N], float32: entry n is V of the state before response token n is chosen.

        That state is all tokens before it, so it is read at position t - 1, as the token's log-prob is. For a piece of
        a row they are those of the whole row.
        """
        values_N: Tensor = self.lm.score(hidden_states(self.lm, batch)[batch.predict_N])
        return batch.whole(values_N)


def load_value_model(path: str, dtype: str, head: Head) -> ValueModel:
    """Load the checkpoint at `path` in `dtype` as a value model, on the CPU; how, and the errors, are in `load.py`.

    "new": from a causal LM, with a head of zeros. Values then start at 0 everywhere: the first advantages are those
    without a baseline, where a random head would add noise of its own. The head has a gradient from the first update
    on, since that depends on the hidden states, and the backbone from the second. "checkpoint": from a sequence-
    classification model, a reward model for instance, with its own head. "auto": with its own head where it has one.
    """
    return ValueModel(load_classifier(path, dtype, head))
