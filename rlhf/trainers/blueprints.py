"""What the actors of each role are made of: class, number, arguments and environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.algorithms.catalogue import has_reference_pool, needs_critic
from rlhf.cluster.actors import Arguments
from rlhf.config.schema import Config
from rlhf.config.threads import threads, usable_cores
from rlhf.learners.critic import CriticLearner
from rlhf.learners.policy import PolicyLearner
from rlhf.rewards.actor import RewardActor
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.types import EngineSpec
from rlhf.scorers.reference import ReferenceScorer
from rlhf.scorers.reward import RewardModelScorer
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.recorder import TrajectoryRecorder
from rlhf.weights.transports import ENGINE_BACKENDS, Transport


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One role: `ranks` actors of the plain class, rank r constructed with `args_for_rank(r)`."""

    plain: type
    ranks: int
    args_for_rank: Callable[[int], Arguments]
    env: Mapping[str, str] = field(default_factory=dict)


def transport(config: Config, device: str) -> Transport:
    """The weight transport: as set, or by the device."""
    if config.weights.transport == "auto":
        return "nccl" if device == "cuda" else "gloo"
    return config.weights.transport


def make_blueprints(
    config: Config,
    device: Any,
    folder: RunFolder,
    reward_functions: Mapping[str, bytes],
    own_algorithms: Mapping[str, bytes],
) -> dict[str, Blueprint]:
    """All roles that this run has; none that nothing needs."""
    backend = ENGINE_BACKENDS[transport(config, device)]

    def engine(rank: int) -> Arguments:
        return (EngineSpec.from_config(config, rank, device=device, weight_backend=backend),), {}

    def model(plain: type, ranks: int, **named: Any) -> Blueprint:
        arguments = lambda rank: ((config, rank, ranks, device), named)  # noqa: E731
        return Blueprint(plain, ranks, arguments, {"DS_ACCELERATOR": device})

    blueprints = {
        "policy": model(PolicyLearner, config.policy.ranks, own=own_algorithms),
        "rollout": Blueprint(RolloutEngine, config.rollout.engines, engine, engine_environment(config, device)),
        "recorder": Blueprint(TrajectoryRecorder, 1, lambda _: ((config.model.path, folder.trajectories), {})),
    }
    if config.reward.functions or reward_functions:
        blueprints["reward"] = Blueprint(
            RewardActor, 1, lambda _: ((config.reward, config.model.path, reward_functions, os.getcwd()), {})
        )
    if needs_critic(config):
        blueprints["critic"] = model(CriticLearner, config.critic.ranks)
    if has_reference_pool(config):
        blueprints["reference"] = model(ReferenceScorer, config.reference.ranks)
    if config.reward.model is not None:
        blueprints["reward_model"] = model(RewardModelScorer, config.reward.model.ranks)
    return blueprints


def engine_environment(config: Config, device: str) -> dict[str, str]:
    """Environment of an engine's processes.

    vLLM's own binding to cores would keep one free for its scheduler, which on two cores is half of them.
    """
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        count = threads(config, usable_cores())["rollout"]
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(count)}
    return environment
