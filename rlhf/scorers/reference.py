"""The reference scorer: a frozen copy of the policy's starting point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rlhf.config.schema import Config
from rlhf.scorers.base import Scorer, ScorerSettings
from rlhf.trajectories import Columns

if TYPE_CHECKING:
    from torch import nn

    from rlhf.models.arrangement import Batch


class ReferenceScorer(Scorer[npt.NDArray[np.float32]]):
    """Log-probs of the response tokens at the sampling temperature: float32 [T] by sample id, NaN elsewhere.

    They are of the distribution that the engine could sample from, where the sample has a sampling mask.
    """

    def __init__(self, config: Config, rank: int, world_size: int, device: Literal["cpu", "cuda"] = "cpu") -> None:
        own = config.reference
        settings = ScorerSettings("reference", config.model.dtype, own.sharded, own.deadline_s)
        super().__init__(config, rank, world_size, device, settings)

    def _load(self) -> nn.Module:
        from rlhf.models.load import load_causal_lm
        from rlhf.models.policy import PolicyModel

        return PolicyModel(load_causal_lm(self._config.model.path, self._config.model.dtype))

    def _evaluate(self, model: Any, batch: Batch, rows: Sequence[Columns]) -> Sequence[npt.NDArray[np.float32]]:
        from rlhf.models.batch import unflatten

        logprobs_N, _ = model(batch, self._config.rollout.sampling.temperature)
        return unflatten(rows, logprobs_N)
