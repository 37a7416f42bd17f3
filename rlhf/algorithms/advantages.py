"""Advantages of a group of samples, from their rewards.

Pure Python on scalars: the driver computes advantages from headers, and a group is an explicit list, never a slice of
a larger array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Rewards whose spread is below this share of their size differ by rounding only and count as equal. Without it the
# rounding of a mean (0.1 + 0.1 + 0.1) / 3 would be scaled up to advantages of +-1.
EQUAL_WITHIN = 1e-9


def group_advantages(rewards: Sequence[float | None]) -> list[float | None] | None:
    """Group-relative advantages (r - mean) / std with the population std; GRPO, arXiv:2402.03300, section 4.1.2.

    A missing reward (None, or not finite) stays None and takes no part in the statistics. Equal rewards give exactly
    0. Returns None when fewer than two rewards are left: such a group has no baseline and is filtered.
    """
    present = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if len(present) < 2:
        return None
    largest = max(abs(reward) for reward in present)
    if max(present) - min(present) <= EQUAL_WITHIN * largest:
        return [0.0 if reward is not None and math.isfinite(reward) else None for reward in rewards]
    # Scaled by a power of two, which is exact, so that the squares of very small or large rewards stay in range.
    _, exponent = math.frexp(largest)
    scaled = [math.ldexp(reward, -exponent) for reward in present]
    mean = math.fsum(scaled) / len(scaled)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / len(scaled))
    return [
        (math.ldexp(reward, -exponent) - mean) / std if reward is not None and math.isfinite(reward) else None
        for reward in rewards
    ]
