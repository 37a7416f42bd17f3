"""Scoring of one finished group: rewards and reference log-probs, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.trajectories import Group

if TYPE_CHECKING:
    from rlhf.trainers.roles import Roles


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group whose trajectories have rewards (None where it failed), and where its reference log-probs are.

    `errors` has the message of each failed sample, by sample id; `figures` what reward functions report beside their
    scores, `<function>/<metric>` by sample.
    """

    group: Group
    reference: Any | None
    errors: Mapping[str, str]
    figures: Sequence[Mapping[str, float]]


async def score_group(roles: Roles, group: Group, step: int, *, reference: bool = True) -> ScoredGroup:
    """Rewards ‖ reference log-probs; the reference is asked only where the run has one and `reference` wants it."""
    scores, columns = await asyncio.gather(
        roles.score(group, step), roles.reference_logprobs(group) if reference else _nothing()
    )
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


async def _nothing() -> None:
    return None
