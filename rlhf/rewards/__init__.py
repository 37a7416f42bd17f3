"""Reward functions, the killable processes they run in, and the actor that scores groups."""

from rlhf.rewards.resolve import check_functions, dump_functions, function_keys, resolve
from rlhf.rewards.types import RewardError, RewardFunction, RewardInput, RewardResult, SampleScore, ScoreResult

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "SampleScore",
    "ScoreResult",
    "check_functions",
    "dump_functions",
    "function_keys",
    "resolve",
]
