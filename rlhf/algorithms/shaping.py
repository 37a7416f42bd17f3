"""What happens to a sample's reward before advantages, in this order: clip, penalties, whitening.

Without torch, on the rewards that the driver has in its headers. What a response is punished for is read from its
length and its finish reason, never from its token ids: with a stop string or a stop token of the user's own the last
id says nothing about whether the response is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf.config.schema import ShapingConfig
from rlhf.trajectories import FinishReason

# Numbers whose spread is below this share of their size differ by rounding only and count as equal. Otherwise dividing
# by their standard deviation would blow up the rounding of a mean, (0.1 + 0.1 + 0.1) / 3, to values of +-1.
EQUAL_WITHIN = 1e-9


def shape_rewards(
    rewards: Sequence[float],
    lengths: Sequence[int],
    finish_reasons: Sequence[FinishReason],
    max_new_tokens: int,
    config: ShapingConfig,
) -> list[float]:
    """Shaped rewards of the S samples of one step, in the same order.

    Each argument has S entries; lengths are in response tokens. Raises `ValueError` when the numbers of entries differ
    or a reward is not finite.
    """
    if not len(rewards) == len(lengths) == len(finish_reasons):
        raise ValueError(
            f"{len(rewards)} rewards, {len(lengths)} lengths and {len(finish_reasons)} finish reasons: one of each "
            "for every sample is needed"
        )
    if bad := [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]:
        raise ValueError(f"{len(bad)} of {len(rewards)} rewards are not finite, first {rewards[bad[0]]} at {bad[0]}")
    shaped = [
        clip_reward(reward, config.clip)
        - eos_penalty(finish_reason, config.missing_eos_penalty)
        - overlong_penalty(length, max_new_tokens, config.overlong_buffer, config.overlong_penalty)
        for reward, length, finish_reason in zip(rewards, lengths, finish_reasons, strict=True)
    ]
    return whiten_rewards(shaped) if config.whiten else shaped


def clip_reward(reward: float, clip: float | None) -> float:
    """The nearest number to the reward in [-clip, clip]; the reward itself without a clip."""
    return reward if clip is None else max(-clip, min(clip, reward))


def eos_penalty(finish_reason: FinishReason, penalty: float) -> float:
    """What to subtract from a response for its missing end: the penalty if it was cut at the token limit, else 0.

    A response that was aborted costs nothing: it was not the policy that left its end out.
    """
    return penalty if finish_reason == "length" else 0.0


def overlong_penalty(length: int, max_new_tokens: int, buffer: int, penalty: float) -> float:
    """What to subtract from a response of `length` tokens: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.

    0 up to `max_new_tokens - buffer`, from there linear to `penalty` at `max_new_tokens` (the paper's is 1). A buffer
    of 0 switches it off.
    """
    if buffer == 0:
        return 0.0
    return penalty * min(1.0, max(0.0, (length - (max_new_tokens - buffer)) / buffer))


def whiten_rewards(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / std over all samples, with the population standard deviation; equal rewards give exactly 0."""
    largest = max(map(abs, rewards), default=0.0)
    if not rewards or max(rewards) - min(rewards) <= EQUAL_WITHIN * largest:
        return [0.0] * len(rewards)
    # In units of the largest, so that the squares of very small or large rewards stay in range.
    scaled = [reward / largest for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / len(scaled))
    return [(reward - mean) / std for reward in scaled]
