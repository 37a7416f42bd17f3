"""Rules about how a step's groups are generated."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config.problems import Problem
from rlhf.config.rules_common import Rule, problem, unused
from rlhf.config.schema import Config


def over_generation_has_a_purpose(config: Config) -> Iterator[Problem]:
    """`rollout.over_generation.rest` needs `groups`, and a deterministic run takes all groups that it started.

    Which groups are complete first is a matter of timing.
    """
    extra = config.rollout.over_generation
    if extra.groups == 0:
        yield from unused(
            config,
            ["rollout.over_generation.rest"],
            "while rollout.over_generation.groups is 0",
            "Set the number of groups beyond rollout.prompts_per_step, or leave it out",
        )
    elif config.run.deterministic:
        yield problem(
            config,
            "rollout.over_generation.groups",
            "with run.deterministic a step trains on what was drawn, and not on what happens to be complete first",
            "Use 0, or set run.deterministic: false",
        )


def dynamic_sampling_can_tell_groups_apart(config: Config) -> Iterator[Problem]:
    """`rollout.dynamic_sampling` needs groups of at least 2, and room to draw; its keys need `enabled`."""
    rollout = config.rollout
    dynamic = rollout.dynamic_sampling
    if not dynamic.enabled:
        keys = [f"rollout.dynamic_sampling.{key}" for key in ("max_factor", "at_limit")]
        yield from unused(
            config, keys, "while rollout.dynamic_sampling.enabled is false", "Set enabled: true, or leave it out"
        )
        return
    if rollout.samples_per_prompt < 2:
        yield problem(
            config,
            "rollout.samples_per_prompt",
            "the rewards of a group of 1 never differ, so rollout.dynamic_sampling would replace every group",
            "Use at least 2, or set rollout.dynamic_sampling.enabled: false",
        )
    first = rollout.prompts_per_step + rollout.over_generation.groups
    if dynamic.max_factor * rollout.prompts_per_step < first:
        yield problem(
            config,
            "rollout.dynamic_sampling.max_factor",
            f"a step begins with {rollout.prompts_per_step} + {rollout.over_generation.groups} = {first} groups, and "
            f"may draw only {dynamic.max_factor} x {rollout.prompts_per_step} = "
            f"{dynamic.max_factor * rollout.prompts_per_step}",
            f"Use at least {-(-first // rollout.prompts_per_step)}",
        )


ROLLOUT_RULES: tuple[Rule, ...] = (over_generation_has_a_purpose, dynamic_sampling_can_tell_groups_apart)
