"""Rules of `algorithm`, of the sampling that it trains on, and of the models that it calls for.

What an estimator or a loss reads and needs stands in `rlhf.config.catalogue`. Functions of a user's own may read any
setting of their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlhf.config.catalogue import (
    ADVANTAGES,
    LOSSES,
    OWN_ADVANTAGES,
    OWN_LOSSES,
    advantage_spec,
    has_reference_pool,
    is_described,
    loss_spec,
    needs_critic,
    policy_is_reference,
    updates_per_batch,
)
from rlhf.config.problems import Problem
from rlhf.config.rules_common import Rule, is_set, problem, unused
from rlhf.config.schema import Config, CriticConfig, ReferenceConfig
from rlhf.config.suggest import nearest

_ADVANTAGE_SETTINGS = ("normalize", "gamma", "gae_lambda", "whiten")
_LOSS_SETTINGS = (
    "clip.low",
    "clip.high",
    "clip.dual",
    "sapo.positive",
    "sapo.negative",
    "dppo.divergence",
    "dppo.threshold",
)
_READ_LOW = ("token_mask", "sequence_mask", "geometric_mask")


# Below it vLLM samples greedily.
_LEAST_TEMPERATURE = 1e-5


def sampling_can_be_trained_on(config: Config) -> Iterator[Problem]:
    """Sampling has a temperature of at least 1e-5, and more than one token to choose from: `top_k` is not 0 or 1.

    `top_p` below 1 needs `top_k`: which tokens could be sampled is replayed in training, and top-p alone sets no bound
    to how many they are.
    """
    sampling = config.rollout.sampling
    greedy = "greedy samples can't be trained on: the samples of a group would all be equal"
    if sampling.temperature < _LEAST_TEMPERATURE:
        yield problem(
            config,
            "rollout.sampling.temperature",
            f"{greedy}, and log-probs at temperature 0 don't exist (vLLM takes anything below 1e-5 for 0)",
            "Use 1.0; held-out problems are answered greedily through evaluation.temperature",
        )
    if sampling.top_k == 0:
        yield problem(config, "rollout.sampling.top_k", "no token is among the first 0", "Use -1 (off), or 2 or more")
    if sampling.top_k == 1:
        yield problem(
            config,
            "rollout.sampling.top_k",
            f"{greedy}, and the only candidate has probability 1 whatever is learned",
            "Use -1 (off), or 2 or more",
        )
    if sampling.top_p < 1 and sampling.top_k < 1:
        yield problem(
            config,
            "rollout.sampling.top_p",
            "training replays which tokens could be sampled, and top-p alone sets no bound to how many they are",
            "Set rollout.sampling.top_k as well (64 seldom changes what top-p keeps), or top_p: 1.0",
        )


def response_lengths_fit(config: Config) -> Iterator[Problem]:
    """`rollout.min_new_tokens` is at most `rollout.max_new_tokens`."""
    rollout = config.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield problem(
            config,
            "rollout.min_new_tokens",
            f"no response can have at least {rollout.min_new_tokens} tokens while rollout.max_new_tokens is "
            f"{rollout.max_new_tokens}",
            f"Use at most {rollout.max_new_tokens}",
        )


def advantage_and_loss_exist(config: Config) -> Iterator[Problem]:
    """Advantage and loss are built-in, registered, or named `module:function` or `path/to/file.py:function`."""
    algorithm = config.algorithm
    for key, name, known, decorator in (
        ("advantage", algorithm.advantage, {**ADVANTAGES, **OWN_ADVANTAGES}, "register_advantage"),
        ("loss", algorithm.loss, {**LOSSES, **OWN_LOSSES}, "register_policy_loss"),
    ):
        place, _, function = name.rpartition(":")
        if name in known or (place and function.isidentifier()):
            continue
        near = nearest(name, known)
        yield problem(
            config,
            f"algorithm.{key}",
            f"must be one of: {', '.join(known)}; or module:function, or path/to/file.py:function",
            f"Did you mean {near}?" if near else f"Functions of your own are registered with @rlhf.{decorator}",
        )


def options_are_for_own_functions(config: Config) -> Iterator[Problem]:
    """`algorithm.options` is set only with an advantage or a loss of one's own."""
    algorithm = config.algorithm
    if algorithm.advantage in ADVANTAGES and algorithm.loss in LOSSES:
        yield from unused(
            config,
            ["algorithm.options"],
            f"on algorithm.advantage {algorithm.advantage} and algorithm.loss {algorithm.loss}: it is for functions of "
            "your own",
            "Leave it out",
        )


def settings_are_read(config: Config) -> Iterator[Problem]:
    """Settings that neither the advantage nor the loss reads are left out.

    Which ones each reads: `normalize` grpo; `gamma` gae, reinforce, reinforce_plus_plus; `gae_lambda` and `whiten` gae;
    `clip.low` ppo, gspo; `clip.high` ppo, gspo, cispo; `clip.dual` ppo; `sapo` sapo; `dppo` dppo.
    """
    algorithm = config.algorithm
    advantages = {name: spec.settings for name, spec in ADVANTAGES.items()}
    losses = {name: spec.settings for name, spec in LOSSES.items()}
    for kind, name, specs, settings in (
        ("advantage", algorithm.advantage, advantages, _ADVANTAGE_SETTINGS),
        ("loss", algorithm.loss, losses, _LOSS_SETTINGS),
    ):
        for setting in settings if name in specs else ():
            if setting not in specs[name]:
                readers = ", ".join(other for other, read in specs.items() if setting in read)
                reason = f"while algorithm.{kind} is {name}"
                yield from unused(config, [f"algorithm.{setting}"], reason, f"Leave it out; it is for {readers}")


def group_is_large_enough(config: Config) -> Iterator[Problem]:
    """`rollout.samples_per_prompt` is at least the group size that the advantage estimator needs.

    That is 2 for grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, opo and maxrl, and 1 for the others.
    """
    estimator = advantage_spec(config.algorithm.advantage)
    n = config.rollout.samples_per_prompt
    if n < estimator.min_group_size:
        yield problem(
            config,
            "rollout.samples_per_prompt",
            f"algorithm.advantage {estimator.name} compares the samples of one prompt with each other: with n = {n} "
            f"there is nothing to compare with and nothing is learned",
            f"Use {estimator.min_group_size} or more, 8 is common; or an estimator for single samples, such as "
            "reinforce_plus_plus",
        )


def kl_settings_have_an_effect(config: Config) -> Iterator[Problem]:
    """A KL coefficient goes with a place for it: `where: none` with coefficient 0, anything else with one above 0.

    The other settings of `algorithm.kl` are for `where: reward` and `loss`; `unbiased` is for the loss, `target` and
    `horizon` are for the adaptive controller.
    """
    kl = config.algorithm.kl
    if kl.where == "none":
        settings = ("coefficient", "estimator", "unbiased", "controller", "target", "horizon")
        hint = "Set algorithm.kl.where and a coefficient above 0, or leave it out"
        yield from unused(config, _in("algorithm.kl", settings), "while algorithm.kl.where is none", hint)
        return
    if kl.coefficient == 0:
        yield problem(
            config,
            "algorithm.kl.coefficient",
            f"with coefficient 0, algorithm.kl.where {kl.where} has no effect but the cost of a reference model",
            "Set a coefficient above 0, or algorithm.kl.where: none",
        )
    if kl.where == "reward":
        reason = "while algorithm.kl.where is reward: no gradient goes through a reward"
        yield from unused(config, ["algorithm.kl.unbiased"], reason, "Leave it out, or set algorithm.kl.where: loss")
    if kl.controller == "fixed":
        yield from unused(
            config,
            _in("algorithm.kl", ("target", "horizon")),
            "while algorithm.kl.controller is fixed",
            "Leave it out, or set algorithm.kl.controller: adaptive",
        )


def kl_estimator_fits_its_place(config: Config) -> Iterator[Problem]:
    """In the loss, `k1` needs `unbiased`, and `unbiased` goes with `k1` and `k3`; maxrl takes no KL in the reward."""
    kl = config.algorithm.kl
    if kl.where == "loss" and kl.estimator == "k1" and not kl.unbiased:
        yield problem(
            config,
            "algorithm.kl.estimator",
            "the gradient of k1 is that of log pi alone, zero in expectation: in the loss it adds noise and no pull",
            "Use k2 or k3, or set algorithm.kl.unbiased: true",
        )
    if kl.where == "loss" and kl.unbiased and kl.estimator in ("k2", "abs"):
        yield problem(
            config,
            "algorithm.kl.unbiased",
            f"{kl.estimator} does not estimate the KL without bias, so weighting it does not give the gradient of the "
            "KL",
            "Use k1 or k3 with it, or leave it out",
        )
    if kl.where == "reward" and config.algorithm.advantage == "maxrl":
        yield problem(
            config,
            "algorithm.kl.where",
            "algorithm.advantage maxrl divides by the mean reward of the group and needs rewards of at least 0, which "
            "a KL penalty makes negative",
            "Use loss, or another advantage",
        )


def trust_region_has_an_effect(config: Config) -> Iterator[Problem]:
    """`algorithm.clip`, `sapo` and `dppo` are set only where the ratio leaves 1.

    That takes several updates on a batch, or `old_logprobs: engine`: in a single update, ratios to the trainer's own
    log-probs are 1 throughout, and a trust region around 1 changes no gradient.
    """
    loss = LOSSES.get(config.algorithm.loss)
    if loss is None or updates_per_batch(config) > 1 or config.algorithm.old_logprobs == "engine":
        return
    yield from unused(
        config,
        _in("algorithm", (setting for setting in _LOSS_SETTINGS if setting in loss.settings)),
        "with policy.epochs 1 and policy.minibatches 1: in the only update of a batch the ratio is 1",
        "Raise policy.epochs or policy.minibatches, or leave it out",
    )


def correction_settings_have_an_effect(config: Config) -> Iterator[Problem]:
    """`algorithm.correction` has `low` only with a masking method, below `high`, and neither with `method: none`."""
    correction = config.algorithm.correction
    keys = {"none": ("low", "high")}.get(correction.method, () if correction.method in _READ_LOW else ("low",))
    yield from unused(
        config,
        _in("algorithm.correction", keys),
        f"while algorithm.correction.method is {correction.method}",
        "Leave it out"
        + ("" if correction.method == "none" else f", or use a method that masks: {', '.join(_READ_LOW)}"),
    )
    if correction.method in _READ_LOW and correction.low >= correction.high:
        key = "low" if is_set(correction, "low") else "high"
        yield problem(
            config,
            f"algorithm.correction.{key}",
            f"low {correction.low:g} is not below high {correction.high:g}, so every sample would be masked",
            "Set low below 1 and high above 1",
        )


def correction_has_something_to_correct(config: Config) -> Iterator[Problem]:
    """`old_logprobs: engine` goes with `correction.method: none`, and `decoupled` with a loss that has a ratio."""
    algorithm = config.algorithm
    method, loss = algorithm.correction.method, loss_spec(algorithm.loss)
    if algorithm.old_logprobs == "engine" and method != "none":
        yield problem(
            config,
            "algorithm.old_logprobs",
            "with the engine's log-probs the ratio starts from the policy that sampled, so there is no mismatch left "
            f"for algorithm.correction.method {method} to weight",
            "Set algorithm.correction.method: none as well, or old_logprobs: auto",
        )
    if method == "decoupled" and not loss.uses_ratio:
        yield problem(
            config,
            "algorithm.correction.method",
            f"decoupled PPO is about where the ratio of the loss starts, and algorithm.loss {loss.name} has none",
            "Use token_truncate, or a loss with a ratio, such as ppo",
        )


def whitened_rewards_fit_the_advantage(config: Config) -> Iterator[Problem]:
    """`reward.shaping.whiten` is for advantages that it changes and that have a use for rewards below 0.

    grpo with a `normalize` and reinforce_plus_plus_baseline scale rewards themselves; maxrl needs rewards of at least
    0; the greedy response of remax is not among the samples that are whitened.
    """
    name = config.algorithm.advantage
    if not config.reward.shaping.whiten:
        return
    rescales = name == "reinforce_plus_plus_baseline" or (name == "grpo" and config.algorithm.normalize != "none")
    reason = {
        "maxrl": "algorithm.advantage maxrl needs rewards of at least 0, and whitening makes about half negative",
        "remax": "algorithm.advantage remax subtracts the reward of a greedy response, which is not whitened",
    }.get(name, f"has no effect: algorithm.advantage {name} does not change with the scale of rewards")
    if name in ("maxrl", "remax") or (rescales and config.algorithm.kl.where != "reward"):
        yield problem(config, "reward.shaping.whiten", reason, "Leave it out, or use another advantage")


def reference_is_needed(config: Config) -> Iterator[Problem]:
    """`reference` is set only where something needs a reference model of its own: KL with a coefficient above 0.

    With `policy.lora` the policy without its adapters is the reference. Its defaults may be restated anywhere.
    """
    if config.reference == ReferenceConfig() or has_reference_pool(config):
        return
    if policy_is_reference(config):
        reason = "with policy.lora the policy is its own reference, with its adapters off, and no other is started"
        hint = "Leave the section out"
    else:
        reason = "nothing in this run needs a reference model, so none is started"
        hint = "Leave the section out, or set algorithm.kl.where: loss and a coefficient above 0"
    yield problem(config, "reference", f"has no effect: {reason}", hint)


def critic_is_needed(config: Config) -> Iterator[Problem]:
    """`critic` is set only where the advantage estimator reads values: gae.

    Its defaults may be restated anywhere. `critic.model: reward` needs `reward.model`.
    """
    if not needs_critic(config):
        if is_described(config.algorithm.advantage) and config.critic != CriticConfig():
            yield problem(
                config,
                "critic",
                f"has no effect: algorithm.advantage {config.algorithm.advantage} needs no critic, so none is started",
                "Leave the section out, or set algorithm.advantage: gae",
            )
    elif config.critic.model == "reward" and config.reward.model is None:
        yield problem(
            config,
            "critic.model",
            "there is no reward model that the critic could start from",
            "Set reward.model, or critic.model: policy",
        )


def _in(section: str, keys: Iterable[str]) -> list[str]:
    return [f"{section}.{key}" for key in keys]


ALGORITHM_RULES: tuple[Rule, ...] = (
    sampling_can_be_trained_on,
    response_lengths_fit,
    advantage_and_loss_exist,
    options_are_for_own_functions,
    settings_are_read,
    group_is_large_enough,
    kl_settings_have_an_effect,
    kl_estimator_fits_its_place,
    trust_region_has_an_effect,
    correction_settings_have_an_effect,
    correction_has_something_to_correct,
    whitened_rewards_fit_the_advantage,
    reference_is_needed,
    critic_is_needed,
)
