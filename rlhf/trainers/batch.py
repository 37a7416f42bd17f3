"""From scored groups to what the learner trains on: advantages, and what can't be trained on set aside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.algorithms.advantages import group_advantages
from rlhf.batching import LearnerSample
from rlhf.trainers.scoring import ScoredGroup
from rlhf.trajectories import Group, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A step's samples with advantages, all groups as they were scored, and the samples that left (by reason)."""

    samples: Sequence[LearnerSample]
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


class StaleSample(RuntimeError):
    """A sample of a synchronous step was not produced by the weights that it is to train."""


def assemble(scored: Sequence[ScoredGroup], *, weight_version: int) -> TrainingBatch:
    """Advantages from each group's rewards, in the order of the draws.

    A sample without a (finite) reward is `failed`. A group with fewer than two rewards left has no baseline: what is
    left of it is `filtered`. Raises `StaleSample` when a sample is of another version than `weight_version`.
    """
    samples: list[LearnerSample] = []
    groups: list[Group] = []
    failed = filtered = 0
    for entry in sorted(scored, key=lambda s: s.group.group_id):
        for t in entry.group.trajectories:
            if t.weight_version != weight_version:
                raise StaleSample(f"sample {t.sample_id} is of version {t.weight_version}, not {weight_version}")
        # What the engine gave up (an abort, an error of its own) was never finished, whatever a function says of it.
        rewards = [None if t.finish_reason == "aborted" else t.reward for t in entry.group.trajectories]
        missing = sum(r is None or not math.isfinite(r) for r in rewards)
        failed += missing
        advantages = group_advantages(rewards)
        if advantages is None:
            filtered += len(rewards) - missing
            groups.append(entry.group)
            continue
        trajectories = [
            t if a is None else t.with_advantage(a) for t, a in zip(entry.group.trajectories, advantages, strict=True)
        ]
        groups.append(replace(entry.group, trajectories=tuple(trajectories)))
        samples += [learner_sample(t, entry.reference) for t in trajectories if t.advantage is not None]
    messages = [message for entry in scored for message in entry.errors.values()]
    first = messages[0] if messages else None
    return TrainingBatch(samples, groups, failed, filtered, len(messages), first, mean_figures(scored))


def mean_figures(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """`reward/<function>/<metric>`: the mean over the samples for which the function reported it."""
    values: dict[str, list[float]] = {}
    for entry in scored:
        for figures in entry.figures:
            for name, value in figures.items():
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def learner_sample(trajectory: Trajectory, reference: Any | None = None) -> LearnerSample:
    """The trajectory as learners and scorers take it."""
    assert trajectory.columns is not None, "a trajectory from the pool has columns"
    return LearnerSample(
        sample_id=trajectory.sample_id,
        group_id=trajectory.group_id,
        total_tokens=trajectory.total_tokens,
        prompt_tokens=trajectory.prompt_tokens,
        advantage=trajectory.advantage or 0.0,
        columns=trajectory.columns,
        reference=reference,
    )
