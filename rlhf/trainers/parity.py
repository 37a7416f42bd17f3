"""The parity probe: do engine and trainer assign the same log-probs to the same tokens under the same weights?

Engines start with dummy weights, so a probe after the first sync also proves that every tensor arrived and was applied
(invariant 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhf.trajectories import Columns


class ParityError(RuntimeError):
    """Engine and trainer disagree beyond what the dtype explains; training on such samples would be wrong."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest and mean absolute difference that is still numeric noise, nats; None: not bounded."""

    max_abs: float
    mean_abs: float | None = None


# Measured on SmolLM2-135M: 3e-5 at most in float32, 0.30 at most and 0.05 on average in bfloat16.
BOUNDS: Mapping[str, Bounds] = {"float32": Bounds(1e-4), "bfloat16": Bounds(1.0, 0.1)}


@dataclass(frozen=True, slots=True)
class Parity:
    """Differences of log-probs over `tokens` tokens, nats, and where the largest one is."""

    max_abs: float
    mean_abs: float
    tokens: int
    worst: str

    def check(self, dtype: str) -> None:
        """Raise `ParityError` with the figures unless they are within the dtype's bounds."""
        bounds = BOUNDS[dtype]
        # Written so that a NaN fails.
        within = self.max_abs <= bounds.max_abs and (bounds.mean_abs is None or self.mean_abs <= bounds.mean_abs)
        if not within:
            mean_rule = "" if bounds.mean_abs is None else f", {bounds.mean_abs:g} on average"
            raise ParityError(
                f"parity probe: engine and trainer differ by up to {self.max_abs:.3g} nats ({self.worst}), "
                f"{self.mean_abs:.3g} on average over {self.tokens} tokens; {dtype} allows {bounds.max_abs:g} at most"
                f"{mean_rule}. Either the engine's weights are not the trainer's, or the two sample from different "
                "distributions. Nothing was trained on these samples."
            )


def compare_logprobs(columns: Mapping[str, Columns], trainer: Mapping[str, npt.NDArray[np.float32]]) -> Parity:
    """Compare the engine's log-probs in `columns` with the trainer's, token by token, by sample id."""
    missing = columns.keys() - trainer.keys()
    if missing or not columns:
        raise ParityError(f"parity probe: the trainer has no log-probs of samples {sorted(missing)}")
    places: list[str] = []
    differences: list[npt.NDArray[np.float32]] = []
    for sample_id, column in columns.items():
        positions = np.flatnonzero(column.loss_mask)
        differences.append(np.abs(column.logprobs[positions] - trainer[sample_id][positions]))
        places += [f"sample {sample_id}, token {t}" for t in positions]
    gaps = np.concatenate(differences)
    # argmax puts a NaN first.
    worst = int(np.argmax(gaps))
    return Parity(float(gaps[worst]), float(gaps.mean()), len(gaps), places[worst])
