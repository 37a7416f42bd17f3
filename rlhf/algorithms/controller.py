"""The coefficient of the KL term over a run. Without torch: the driver keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf.config.schema import KLConfig

# Ziegler et al. take at most this relative error into account, so that one odd batch can't move the coefficient far.
LARGEST_ERROR = 0.2


class KLController:
    """The coefficient of the KL term: fixed, or following the measured KL towards a target.

    Adaptive: error = clip(KL / target - 1, -0.2, 0.2), coefficient *= 1 + error * samples / horizon; Ziegler et al.,
    arXiv:1909.08593, section 2.2, with samples / horizon, as in its code, in place of the paper's 0.1. Pure state, no
    I/O.
    """

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self._coefficient = config.coefficient

    @property
    def coefficient(self) -> float:
        """Factor of the KL term now."""
        return self._coefficient

    def update(self, kl: float, samples: int) -> None:
        """Take in the mean KL (nats per token) that was measured over `samples` responses; NaN changes nothing.

        A batch of more samples than the horizon counts as one horizon, so that the coefficient can't turn negative.
        """
        if self._config.controller == "fixed" or math.isnan(kl):
            return
        error = min(max(kl / self._config.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self._coefficient *= 1 + error * min(samples / self._config.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """What has to be kept to continue a run."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state`; a fixed controller keeps the coefficient of its configuration.

        Raises KeyError if the coefficient is missing, ValueError if it is negative or not finite.
        """
        coefficient = state["coefficient"]
        if not math.isfinite(coefficient) or coefficient < 0:
            raise ValueError(f"KL coefficient {coefficient} of a saved state is not a finite number of at least 0")
        if self._config.controller == "adaptive":
            self._coefficient = coefficient
