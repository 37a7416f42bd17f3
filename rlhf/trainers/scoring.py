"""Scoring of one finished group: rewards of functions and model, and reference log-probs, side by side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.trajectories import Group

if TYPE_CHECKING:
    from rlhf.rewards.types import SampleScore
    from rlhf.trainers.roles import Roles

# Where a reward model's score stands among those of the functions.
REWARD_MODEL = "reward_model"


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group whose trajectories have rewards (None where it failed).

    `reference` leads each sample, by id, to its reference log-probs; `errors` has the message of each failed sample, by
    sample id; `figures` what reward functions report beside their scores, `<function>/<metric>` by sample.
    """

    group: Group
    reference: Mapping[str, Any] | None
    errors: Mapping[str, str]
    figures: Sequence[Mapping[str, float]]


async def score_group(roles: Roles, group: Group, step: int, *, reference: bool = True) -> ScoredGroup:
    """Rewards ‖ reward model ‖ reference log-probs, each where the run has it; `reference` says if it is wanted."""
    if not group.trajectories:
        return ScoredGroup(group, None, {}, [])
    scores, modelled, columns = await asyncio.gather(
        roles.score(group, step),
        roles.reward_model_scores(group),
        roles.reference_logprobs(group) if reference else _nothing(),
    )
    if modelled is not None:
        weight = roles.reward_model_weight
        scores = [
            with_model_score(score, modelled[trajectory.sample_id], weight)
            for score, trajectory in zip(scores, group.trajectories, strict=True)
        ]
    trajectories = tuple(
        trajectory.with_reward(score.reward, score.by_function)
        for trajectory, score in zip(group.trajectories, scores, strict=True)
    )
    errors = {
        trajectory.sample_id: score.error
        for trajectory, score in zip(group.trajectories, scores, strict=True)
        if score.error is not None
    }
    return ScoredGroup(replace(group, trajectories=trajectories), columns, errors, [score.metrics for score in scores])


def with_model_score(score: SampleScore, modelled: float, weight: float) -> SampleScore:
    """Add a reward model's score to that of the functions; a sample that a function failed on stays failed.

    A score that is not finite is an error and not a reward.
    """
    by_function = {**score.by_function, REWARD_MODEL: modelled}
    if not math.isfinite(modelled):
        error = score.error or f"the reward model's score is {modelled}"
        return replace(score, reward=None, by_function={**by_function, REWARD_MODEL: None}, error=error)
    reward = None if score.reward is None else score.reward + weight * modelled
    return replace(score, reward=reward, by_function=by_function)


async def _nothing() -> None:
    return None
