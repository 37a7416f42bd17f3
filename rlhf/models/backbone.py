"""What models of every kind here share: the pass through the backbone, and a head with one output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf.models.batch import PaddedBatch
from rlhf.models.packed import PackedBatch, packed_hidden_states


def hidden_states(lm: Any, batch: PaddedBatch | PackedBatch) -> Tensor:
    """Last hidden states [P, H] of the backbone of a transformers model, without its head, at the batch's P positions.

    The batch's `predict_N` and `last_B` say where among them.
    """
    if isinstance(batch, PackedBatch):
        return packed_hidden_states(lm, batch)
    backbone = getattr(lm, lm.base_model_prefix)
    output = backbone(input_ids=batch.input_ids_BL, position_ids=batch.position_ids_BL, use_cache=False)
    states: Tensor = output.last_hidden_state.flatten(0, 1)
    return states


class ScalarHead(nn.Module):
    """A linear head with one output, computed in float32 whatever the dtype of its parameters.

    In bfloat16 two scores near 10 are equal or 0.06 apart, which is more than rewards of one group may differ. It takes
    a linear layer's parameters over, under their names.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """One float32 number [N] for each hidden state."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden_NH.float(), self.weight.float(), bias).squeeze(-1)

    @staticmethod
    def zeros(hidden: int, dtype: torch.dtype) -> ScalarHead:
        """A new head [1, hidden] without a bias, whose output is 0."""
        return ScalarHead(nn.Parameter(torch.zeros(1, hidden, dtype=dtype)))
