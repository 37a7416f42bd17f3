"""From what each function said to what trains: a pure function.

The reward of a sample is the weighted sum over the functions that apply to it. A function that answers None doesn't
apply and adds nothing; weights aren't rescaled for it. A sample to which no function applies, or on which any function
failed, has no reward: `reward.on_error` decides what happens with it (invariant 8: an error is not a reward).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rlhf.rewards.types import RewardError, SampleScore
from rlhf.rewards.worker import CallResult, Value

OnError = Literal["raise", "drop"] | float


def combine(
    keys: Sequence[str],
    weights: Sequence[float],
    results: Sequence[CallResult],
    *,
    prompt_id: str,
    sample_indices: Sequence[int],
    on_error: OnError,
) -> list[SampleScore]:
    """Score a group of G samples from the results of F functions; `keys`, `weights` and `results` have length F.

    Raises `RewardError` that names every failed function and sample when `on_error` is `raise`.
    """
    scores = []
    errors: dict[str, None] = {}
    for position, sample in enumerate(sample_indices):
        by_function: dict[str, float | None] = {}
        metrics: dict[str, float] = {}
        failed = []
        for key, result in zip(keys, results, strict=True):
            value = Value() if result.error else result.values[position]
            by_function[key] = value.score
            metrics |= {f"{key}/{name}": figure for name, figure in value.metrics.items()}
            if result.error:
                failed.append(
                    f"reward function {key!r}, prompt {prompt_id!r}, all {len(sample_indices)} samples: {result.error}"
                )
            elif value.error:
                failed.append(f"reward function {key!r}, prompt {prompt_id!r}, sample {sample}: {value.error}")
        if not failed and all(score is None for score in by_function.values()):
            failed.append(f"prompt {prompt_id!r}, sample {sample}: no reward function applies (each returned None)")
        errors |= dict.fromkeys(failed)
        scores.append(_score(by_function, dict(zip(keys, weights, strict=True)), metrics, failed, on_error))
    if errors and on_error == "raise":
        raise RewardError(
            "\n".join(errors) + "\nset reward.on_error to `drop`, or to a value, to go on without these samples"
        )
    return scores


def _score(
    by_function: dict[str, float | None],
    weights: dict[str, float],
    metrics: dict[str, float],
    failed: list[str],
    on_error: OnError,
) -> SampleScore:
    if failed:
        reward = None if isinstance(on_error, str) else float(on_error)
        return SampleScore(reward, by_function, "\n".join(failed), metrics)
    # fsum: three weights that add up to 1 give a perfect sample exactly 1.
    reward = math.fsum(weights[key] * score for key, score in by_function.items() if score is not None)
    return SampleScore(reward, by_function, None, metrics)
