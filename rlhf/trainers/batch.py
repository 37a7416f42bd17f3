"""From scored groups to what the learners train on: what can't be trained on is set aside, and rewards are shaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.algorithms.catalogue import advantage_spec
from rlhf.algorithms.shaping import shape_rewards
from rlhf.batching import Estimates, LearnerSample, RewardedSample
from rlhf.config.schema import Config, ShapingConfig
from rlhf.trainers.scoring import ScoredGroup
from rlhf.trajectories import Group, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A step's samples with shaped rewards, all groups as they were scored, and the samples that left (by reason)."""

    samples: Sequence[RewardedSample]
    groups: Sequence[Group]
    failed: int
    filtered: int
    errors: int
    first_error: str | None
    figures: Mapping[str, float]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All samples of the step, also those that aren't trained on."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def metrics(self) -> dict[str, float]:
        """`reward/errors`: samples whose reward failed, whatever `reward.on_error` made of them; and `figures`."""
        return {"reward/errors": float(self.errors), **self.figures}

    def estimated(self, samples: Sequence[LearnerSample], estimates: Estimates) -> TrainingBatch:
        """The same batch with what was estimated: `samples` lead to their advantages, headers carry the means."""
        kept = [replace(entry, sample=sample) for entry, sample in zip(self.samples, samples, strict=True)]
        groups = [_with_advantages(group, estimates.advantages) for group in self.groups]
        return replace(self, samples=kept, groups=groups).with_figures(estimates.metrics)

    def with_figures(self, figures: Mapping[str, float]) -> TrainingBatch:
        """The same batch with more figures for the step's metrics."""
        return replace(self, figures={**self.figures, **figures})


class StaleSample(RuntimeError):
    """A sample of a synchronous step was not produced by the weights that it is to train."""


def assemble(
    scored: Sequence[ScoredGroup],
    config: Config,
    *,
    weight_version: int,
    greedy: Mapping[int, Trajectory] | None = None,
) -> TrainingBatch:
    """Set aside what can't be trained on, and shape the rewards of the rest, in the order of the draws.

    A sample without a (finite) reward is `failed`. A group with fewer rewards left than the estimator needs to compare,
    or whose greedy response (`greedy`, by group, where the estimator wants one) has none, is `filtered`; with dynamic
    sampling also one whose rewards are all equal. Raises `StaleSample` when a sample is of another version than
    `weight_version`.
    """
    least = advantage_spec(config.algorithm.advantage).min_group_size
    dynamic = config.rollout.dynamic_sampling.enabled
    kept: list[tuple[Trajectory, ScoredGroup]] = []
    failed = filtered = 0
    ordered = sorted(scored, key=lambda s: s.group.group_id)
    for entry in ordered:
        for t in entry.group.trajectories:
            if t.weight_version != weight_version:
                raise StaleSample(f"sample {t.sample_id} is of version {t.weight_version}, not {weight_version}")
        usable = [t for t in entry.group.trajectories if _reward(t) is not None]
        failed += len(entry.group.trajectories) - len(usable)
        baseline = None if greedy is None else greedy.get(entry.group.group_id)
        without_baseline = greedy is not None and (baseline is None or _reward(baseline) is None)
        if len(usable) < least or without_baseline or (dynamic and not can_be_learned_from(entry, config)):
            filtered += len(usable)
        else:
            kept += [(t, entry) for t in usable]
    trajectories = [t for t, _ in kept]
    shaping, limit = config.reward.shaping, config.rollout.max_new_tokens
    shaped = _shape(trajectories, limit, shaping)
    samples = [
        RewardedSample(
            learner_sample(t).with_scores(reference=(entry.reference or {}).get(t.sample_id)),
            reward,
            None if greedy is None else _shape([greedy[t.group_id]], limit, shaping)[0],
        )
        for (t, entry), reward in zip(kept, shaped, strict=True)
    ]
    messages = [message for entry in scored for message in entry.errors.values()]
    figures = mean_figures(scored)
    if shaping != ShapingConfig() and shaped:
        figures["reward/shaped_mean"] = sum(shaped) / len(shaped)
    first = messages[0] if messages else None
    return TrainingBatch(samples, [e.group for e in ordered], failed, filtered, len(messages), first, figures)


def can_be_learned_from(scored: ScoredGroup, config: Config) -> bool:
    """Whether a group has as many rewards as the estimator compares, and they are not all equal."""
    rewards = [reward for t in scored.group.trajectories if (reward := _reward(t)) is not None]
    return len(rewards) >= advantage_spec(config.algorithm.advantage).min_group_size and len(set(rewards)) > 1


def _reward(trajectory: Trajectory) -> float | None:
    """The reward that counts; what the engine gave up (an abort, an error of its own) was never finished."""
    reward = None if trajectory.finish_reason == "aborted" else trajectory.reward
    return reward if reward is not None and math.isfinite(reward) and trajectory.response_tokens > 0 else None


def _shape(trajectories: Sequence[Trajectory], max_new_tokens: int, shaping: ShapingConfig) -> list[float]:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    lengths = [t.response_tokens for t in trajectories]
    return shape_rewards(rewards, lengths, [t.finish_reason for t in trajectories], max_new_tokens, shaping)


def _with_advantages(group: Group, advantages: Mapping[str, float]) -> Group:
    trajectories = tuple(
        t.with_advantage(advantages[t.sample_id]) if t.sample_id in advantages else t for t in group.trajectories
    )
    return replace(group, trajectories=trajectories)


def mean_figures(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """`reward/<function>/<metric>`: the mean over the samples for which the function reported it."""
    values: dict[str, list[float]] = {}
    for entry in scored:
        for figures in entry.figures:
            for name, value in figures.items():
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def learner_sample(trajectory: Trajectory) -> LearnerSample:
    """The trajectory as learners and scorers take it."""
    assert trajectory.columns is not None, "a trajectory from the pool has columns"
    return LearnerSample(
        sample_id=trajectory.sample_id,
        group_id=trajectory.group_id,
        total_tokens=trajectory.total_tokens,
        prompt_tokens=trajectory.prompt_tokens,
        columns=trajectory.columns,
    )
