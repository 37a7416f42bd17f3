"""What is checked before anything is started, besides the configuration's own rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.cluster.preflight import Refused
from rlhf.config.schema import Config, RunConfig
from rlhf.rewards import check_functions, dump_functions
from rlhf.tracking.folder import RunExists, RunFolder, RunFolderError

if TYPE_CHECKING:
    from rlhf.rewards.types import RewardFunction


def check_run_folder(run: RunConfig) -> None:
    """Refuse a run whose folder is taken, before anything is started."""
    try:
        RunFolder.check(run)
    except (RunExists, RunFolderError) as error:
        raise Refused(str(error)) from error


def check_rewards(config: Config, functions: Mapping[str, RewardFunction]) -> dict[str, bytes]:
    """Check all reward functions with their options; returns those given from Python, as they travel."""
    problems = check_functions(config.reward.functions, functions, os.getcwd())
    if problems:
        raise Refused("reward functions:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return dump_functions(functions)
