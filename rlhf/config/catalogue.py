"""What each algorithm needs, as plain facts: the one place that the schema's rules and the trainers both read.

It lives in the configuration room, which may import nothing, and `rlhf.algorithms.catalogue` hands it to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schema import Config


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """What an advantage estimator asks of a run.

    `min_group_size` counts samples of one prompt: an estimator whose baseline comes from the other samples of the
    group has nothing to compare a single sample with.
    """

    name: str
    min_group_size: int


ADVANTAGES = {spec.name: spec for spec in (AdvantageSpec("grpo", min_group_size=2),)}

BUILT_IN_REWARDS = ("reasoning_gym", "exact_match", "regex", "length")


def needs_reference(config: Config) -> bool:
    """Whether anything reads the reference model's log-probs; without it no reference actor is started."""
    return config.algorithm.kl.where != "none" and config.algorithm.kl.coefficient > 0
