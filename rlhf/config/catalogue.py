"""What each algorithm needs, as plain facts: the one place that the schema's rules and the trainers both read.

It lives in the configuration room, which may import nothing, and `rlhf.algorithms.catalogue` hands it to the others.
Estimators and losses of a user's own are described here too, by `rlhf.register_advantage` and
`rlhf.register_policy_loss`; what the functions do is in `rlhf.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhf.config.schema import Config


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """What an advantage estimator asks of a run.

    `min_group_size` counts samples of one prompt: an estimator whose baseline comes from the other samples of the
    group has nothing to compare a single sample with. `level` says whether all tokens of a response share one
    advantage; `settings` are the keys of `algorithm` that it reads.
    """

    name: str
    min_group_size: int = 1
    level: Literal["sequence", "token"] = "sequence"
    needs_critic: bool = False
    needs_greedy: bool = False
    settings: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a policy loss reads: whether it has a ratio to old log-probs, and its keys of `algorithm`."""

    name: str
    uses_ratio: bool = True
    settings: frozenset[str] = frozenset()


ADVANTAGES = {
    spec.name: spec
    for spec in (
        AdvantageSpec("gae", level="token", needs_critic=True, settings=frozenset({"gamma", "gae_lambda", "whiten"})),
        AdvantageSpec("grpo", min_group_size=2, settings=frozenset({"normalize"})),
        AdvantageSpec("dr_grpo", min_group_size=2),
        AdvantageSpec("rloo", min_group_size=2),
        AdvantageSpec("reinforce", level="token", settings=frozenset({"gamma"})),
        AdvantageSpec("reinforce_plus_plus", level="token", settings=frozenset({"gamma"})),
        AdvantageSpec("reinforce_plus_plus_baseline", min_group_size=2),
        AdvantageSpec("remax", needs_greedy=True),
        AdvantageSpec("opo", min_group_size=2),
        AdvantageSpec("maxrl", min_group_size=2),
    )
}

LOSSES = {
    spec.name: spec
    for spec in (
        LossSpec("ppo", settings=frozenset({"clip.low", "clip.high", "clip.dual"})),
        LossSpec("gspo", settings=frozenset({"clip.low", "clip.high"})),
        LossSpec("cispo", settings=frozenset({"clip.high"})),
        LossSpec("sapo", settings=frozenset({"sapo.positive", "sapo.negative"})),
        LossSpec("reinforce", uses_ratio=False),
        LossSpec("dppo", settings=frozenset({"dppo.divergence", "dppo.threshold"})),
    )
}

BUILT_IN_REWARDS = ("reasoning_gym", "exact_match", "regex", "length")

# Registered in this process by `rlhf.register_advantage` and `rlhf.register_policy_loss`.
OWN_ADVANTAGES: dict[str, AdvantageSpec] = {}
OWN_LOSSES: dict[str, LossSpec] = {}


def advantage_spec(name: str) -> AdvantageSpec:
    """The facts about an estimator; one that is named `module:function` asks for nothing unless it was registered."""
    return ADVANTAGES.get(name) or OWN_ADVANTAGES.get(name) or AdvantageSpec(name, level="token")


def loss_spec(name: str) -> LossSpec:
    """The facts about a policy loss; one that is named `module:function` has a ratio."""
    return LOSSES.get(name) or OWN_LOSSES.get(name) or LossSpec(name)


def is_described(advantage: str) -> bool:
    """Whether it is known what an estimator asks for; of `module:function`, only once its module was imported."""
    return advantage in ADVANTAGES or advantage in OWN_ADVANTAGES


def needs_reference(config: Config) -> bool:
    """Whether anything reads the reference model's log-probs."""
    return config.algorithm.kl.where != "none" and config.algorithm.kl.coefficient > 0


def policy_is_reference(config: Config) -> bool:
    """Whether the policy gives the reference model's log-probs, with its adapters off."""
    return needs_reference(config) and config.policy.lora is not None


def has_reference_pool(config: Config) -> bool:
    """Whether the reference model has actors of its own; without it none is started."""
    return needs_reference(config) and not policy_is_reference(config)


def needs_critic(config: Config) -> bool:
    """Whether the advantage estimator reads a critic's values; without it no critic is started."""
    return advantage_spec(config.algorithm.advantage).needs_critic


def needs_greedy(config: Config) -> bool:
    """Whether the advantage estimator compares with a greedy response to each prompt."""
    return advantage_spec(config.algorithm.advantage).needs_greedy


def updates_per_batch(config: Config) -> int:
    """Optimizer updates that the policy makes on one batch, if it has enough samples."""
    return config.policy.epochs * config.policy.minibatches


def needs_old_logprobs(config: Config) -> bool:
    """Whether the policy's log-probs before the first update are computed in a pass of their own.

    Not when the engine's are used, and with `auto` not when the only update of a batch is at the very weights that
    they would be computed with (its ratio is 1, and the current log-probs, detached, are the old ones); KL in the
    reward needs them before the update.
    """
    algorithm = config.algorithm
    if algorithm.old_logprobs == "engine":
        return False
    if algorithm.old_logprobs == "recompute" or (algorithm.kl.where == "reward" and needs_reference(config)):
        return True
    return updates_per_batch(config) > 1
