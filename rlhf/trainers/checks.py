"""What is checked before anything is started, besides the configuration's own rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from rlhf.algorithms.registry import OwnFunctionError, dump_own
from rlhf.cluster.preflight import Refused
from rlhf.config import ConfigError, files, rules
from rlhf.config.rules import device_problems
from rlhf.config.schema import Config, RunConfig
from rlhf.rewards import check_functions, dump_functions
from rlhf.tracking.folder import RunFolder, RunFolderError
from rlhf.trainers.journal import Journal

if TYPE_CHECKING:
    from rlhf.rewards.types import RewardFunction


def check_configuration(config: Config) -> None:
    """Raise `ConfigError` with everything that the rules find; a `Config` made in Python has not been checked yet."""
    problems = [*rules.check(config), *files.check_files(config)]
    if problems:
        raise ConfigError(problems)


def check_run_folder(run: RunConfig) -> None:
    """Refuse a run whose folder is taken, before anything is started."""
    try:
        RunFolder.check(run)
    except RunFolderError as error:
        raise Refused(str(error)) from error


def open_journal(config: Config) -> Journal:
    """Claim the run folder; another process may have taken it since `check_run_folder`."""
    try:
        return Journal.open(config)
    except RunFolderError as error:
        raise Refused(str(error)) from error


def check_device(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Refuse settings that don't go with the device that `placement.device: auto` has come to."""
    problems = list(device_problems(config, device))
    if problems:
        raise Refused(f"on {device}:\n" + "\n".join(f"  - {problem}" for problem in problems))


def check_rewards(config: Config, functions: Mapping[str, RewardFunction]) -> dict[str, bytes]:
    """Check all reward functions with their options; returns those given from Python, as they travel."""
    problems = check_functions(config.reward.functions, functions, os.getcwd())
    if problems:
        raise Refused("reward functions:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return dump_functions(functions)


def check_algorithms(config: Config) -> dict[str, bytes]:
    """Find an advantage estimator and a loss of the user's own; returns them as they travel to the learner."""
    try:
        return dump_own(config.algorithm.advantage, config.algorithm.loss)
    except OwnFunctionError as error:
        raise Refused(str(error)) from error
