"""Who may compute with how many threads on a CPU.

Pools that work one after the other take turns on all cores, since half of the cores for each would leave half of them
idle all the time: while engines generate learners wait, and the other way round. Processes that work at the same time
share the cores: the ranks of policy and critic, a scorer's ranks, the workers of all engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from rlhf.config.catalogue import needs_critic
from rlhf.config.schema import Config


def usable_cores() -> int:
    """Cores that this process may use; less than the machine's under `taskset` or in a container."""
    return len(os.sched_getaffinity(0))


def threads(config: Config, cores: int) -> dict[str, int]:
    """Threads of one process of each pool, on a machine with so many cores; at least 1.

    With `run.deterministic` it is 1: with more, sums are rounded as the threads happen to come.
    """
    learners = config.policy.ranks + (config.critic.ranks if needs_critic(config) else 0)
    at_once = {
        "policy": learners,
        "critic": learners,
        "reference": config.reference.ranks,
        "reward_model": 1 if config.reward.model is None else config.reward.model.ranks,
        "rollout": config.rollout.engines * config.rollout.tensor_parallel,
    }
    usable = 1 if config.run.deterministic else cores
    return {pool: max(1, usable // processes) for pool, processes in at_once.items()}


def render_threads(config: Config, cores: int, pools: Iterable[str]) -> str:
    """One line for people, on the pools of a run on CPUs."""
    of_each = threads(config, cores)
    said = ", ".join(f"{pool} {of_each[pool]}" for pool in pools if pool in of_each)
    return f"threads of a process, on {cores} cores (pools take turns): {said}"
