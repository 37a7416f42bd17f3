"""Evaluation on held-out problems: every one of them once, with the run's own reward functions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlhf.cluster.wait import first_failure
from rlhf.config.schema import Config
from rlhf.rollout.types import Sampling
from rlhf.tracking.metrics import reward_metrics
from rlhf.trainers.prompts import RunPrompts
from rlhf.trainers.scoring import ScoredGroup, score_group

if TYPE_CHECKING:
    from rlhf.trainers.roles import Roles


# Weights such as 0.7 and 0.3 don't add up to 1 exactly.
_ROUNDING = 1e-9


class Evaluator:
    """Evaluates the weights that the engines serve. Its samples are not training samples and not in the ledger."""

    def __init__(self, config: Config, prompts: RunPrompts, roles: Roles) -> None:
        self._settings = config.evaluation
        self._last_step = config.run.steps
        self._prompts = prompts
        self._roles = roles
        self._sampling = Sampling.for_training(config)

    def due(self, step: int) -> bool:
        """Before step 1, after the last step, and every `evaluation.every` steps between."""
        if self._settings is None:
            return False
        every = self._settings.every
        return step in (0, self._last_step) or (every > 0 and step % every == 0)

    async def evaluate(self, step: int) -> dict[str, float]:
        """One greedy response (by default) to each problem.

        `eval/reward_mean` is over the problems with a reward, `eval/accuracy` the share of all problems whose reward
        is at least 1, `eval/problems` their number.
        """
        assert self._settings is not None
        sampling = self._sampling.at_temperature(self._settings.temperature)
        stream = self._roles.pool.stream(self._prompts.held_out(), 1, sampling, purpose=f"eval{step}")
        scored: list[asyncio.Task[ScoredGroup]] = []
        async with first_failure() as scoring:
            async for group in stream:
                scored.append(scoring.create_task(score_group(self._roles, group, step, reference=False)))
        trajectories = [t for task in scored for t in task.result().group.trajectories]
        solved = sum(t.reward is not None and t.reward >= 1.0 - _ROUNDING for t in trajectories)
        return {
            **{f"eval/{name.replace('/', '_')}": value for name, value in reward_metrics(trajectories).items()},
            "eval/accuracy": solved / len(trajectories),
            "eval/problems": float(len(trajectories)),
        }
