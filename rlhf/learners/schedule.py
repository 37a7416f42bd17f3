"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from rlhf.config.schema import LearnerConfig


def learning_rate(config: LearnerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step`, of 1 to `steps`.

    It rises linearly from 0 (which would be step 0) to `config.learning_rate` at step `warmup_steps`; from there, or
    from step 1 without warm-up, it stays (constant) or falls to 0 at the last step, along a line or half a cosine.
    """
    peak = max(config.warmup_steps, 1)
    if step < peak:
        return config.learning_rate * step / peak
    if config.schedule == "constant" or steps <= peak:
        return config.learning_rate
    done = min((step - peak) / (steps - peak), 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
