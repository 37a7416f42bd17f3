"""Rules that concern several keys, or a value together with what the algorithms can do.

Each rule is a small function from a valid configuration to the problems that it finds; its docstring is its entry in
the documentation. A value is refused when it can't train, when it contradicts another, or when it was set to
something that will not happen: nothing is switched or ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from rlhf.config.catalogue import ADVANTAGES, BUILT_IN_REWARDS, needs_reference
from rlhf.config.problems import ABSENT, Problem
from rlhf.config.schema import Config, ReasoningGymPrompts, ReferenceConfig
from rlhf.config.suggest import nearest

Rule = Callable[[Config], Iterator[Problem]]


def check(config: Config) -> list[Problem]:
    """Everything that the rules find wrong."""
    return [problem for rule in RULES for problem in rule(config)]


def sampling_can_be_trained_on(config: Config) -> Iterator[Problem]:
    """Sampling has a temperature above 0, `top_p: 1.0` and `top_k: -1`.

    A greedy sample has no probability to raise, and log-probs of a truncated distribution are not those that the
    policy is trained with.
    """
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield _problem(
            config,
            "rollout.sampling.temperature",
            "greedy samples can't be trained on: the samples of a group would all be equal, and log-probs at "
            "temperature 0 don't exist",
            "Use 1.0; held-out problems are answered greedily through evaluation.temperature",
        )
    truncated = "truncates the distribution that is sampled from, and training on it needs the same truncation there"
    if sampling.top_p < 1:
        yield _problem(config, "rollout.sampling.top_p", f"top-p {truncated}, which is not supported", "Use 1.0")
    if sampling.top_k != -1:
        yield _problem(config, "rollout.sampling.top_k", f"top-k {truncated}, which is not supported", "Use -1 (off)")


def group_is_large_enough(config: Config) -> Iterator[Problem]:
    """`rollout.samples_per_prompt` is at least the group size that the advantage estimator needs (grpo: 2)."""
    estimator = ADVANTAGES[config.algorithm.advantage]
    n = config.rollout.samples_per_prompt
    if n < estimator.min_group_size:
        yield _problem(
            config,
            "rollout.samples_per_prompt",
            f"algorithm.advantage {estimator.name} compares the samples of one prompt with each other: with n = {n} "
            f"every advantage is 0 and nothing is learned",
            f"Use {estimator.min_group_size} or more, 8 is common",
        )


def kl_settings_have_an_effect(config: Config) -> Iterator[Problem]:
    """A KL coefficient goes with a place for it: `where: none` with coefficient 0, anything else with one above 0."""
    kl = config.algorithm.kl
    if kl.where == "none" and kl.coefficient > 0:
        yield _problem(
            config,
            "algorithm.kl.coefficient",
            "has no effect while algorithm.kl.where is none",
            "Set algorithm.kl.where: loss, or the coefficient to 0",
        )
    if kl.where == "none" and kl.estimator != type(kl)().estimator:
        yield _problem(
            config,
            "algorithm.kl.estimator",
            "has no effect while algorithm.kl.where is none",
            "Set algorithm.kl.where: loss and a coefficient, or leave the estimator out",
        )
    if kl.where == "loss" and kl.estimator == "k1":
        yield _problem(
            config,
            "algorithm.kl.estimator",
            "the gradient of k1 is that of log pi alone, zero in expectation: in the loss it adds noise and no pull",
            "Use k2 or k3",
        )
    if kl.where != "none" and kl.coefficient == 0:
        yield _problem(
            config,
            "algorithm.kl.coefficient",
            f"with coefficient 0, algorithm.kl.where {kl.where} has no effect but the cost of a reference model",
            "Set a coefficient above 0, or algorithm.kl.where: none",
        )


def clip_has_an_effect(config: Config) -> Iterator[Problem]:
    """`algorithm.clip` is set only where a batch makes several updates: in a single one the ratio is 1 throughout."""
    policy = config.policy
    if policy.epochs * policy.minibatches > 1:
        return
    for side in ("low", "high"):
        if not _is_default(config.algorithm.clip, side):
            yield _problem(
                config,
                f"algorithm.clip.{side}",
                "has no effect with policy.epochs 1 and policy.minibatches 1: in the only update of a batch the ratio "
                "is 1",
                "Raise policy.epochs or policy.minibatches, or leave it out",
            )


def reference_is_needed(config: Config) -> Iterator[Problem]:
    """`reference` is set only where something needs a reference model: KL with a coefficient above 0.

    Its defaults may be restated anywhere.
    """
    if config.reference != ReferenceConfig() and not needs_reference(config):
        yield _problem(
            config,
            "reference",
            "has no effect: nothing in this run needs a reference model, so none is started",
            "Leave the section out, or set algorithm.kl.where: loss and a coefficient above 0",
        )


def deterministic_is_possible(config: Config) -> Iterator[Problem]:
    """`run.deterministic` needs `model.dtype: float32`, a CPU and one engine."""
    if not config.run.deterministic:
        return
    if config.model.dtype != "float32":
        yield _problem(
            config,
            "model.dtype",
            "run.deterministic promises results that repeat bit for bit, and that is kept in float32 only",
            "Set model.dtype: float32, or run.deterministic: false",
        )
    if config.placement.device == "cuda":
        yield _problem(
            config,
            "placement.device",
            "run.deterministic promises results that repeat bit for bit, and that is kept on CPU only",
            "Set placement.device: cpu, or run.deterministic: false",
        )
    if config.rollout.engines > 1:
        yield _problem(
            config,
            "rollout.engines",
            "run.deterministic needs one engine: with several, timing decides which of them samples what",
            "Set rollout.engines: 1, or run.deterministic: false",
        )


def warmup_ends_before_the_run(config: Config) -> Iterator[Problem]:
    """`policy.warmup_steps` is below `run.steps`."""
    if config.policy.warmup_steps >= config.run.steps:
        yield _problem(
            config,
            "policy.warmup_steps",
            f"the warm-up would not end within run.steps = {config.run.steps}",
            f"Use at most {config.run.steps - 1}",
        )


def every_update_has_samples(config: Config) -> Iterator[Problem]:
    """Each update has at least one sample for every rank.

    An update gets prompts_per_step x samples_per_prompt / minibatches samples.
    """
    rollout, policy = config.rollout, config.policy
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if samples < policy.minibatches * policy.ranks:
        yield _problem(
            config,
            "policy.minibatches" if policy.minibatches > 1 else "policy.ranks",
            f"a step has {rollout.prompts_per_step} x {rollout.samples_per_prompt} = {samples} samples, and "
            f"policy.minibatches {policy.minibatches} x policy.ranks {policy.ranks} = "
            f"{policy.minibatches * policy.ranks} parts of at least one sample don't come out of it",
            "Lower policy.minibatches or policy.ranks, or sample more",
        )


def transport_fits_the_device(config: Config) -> Iterator[Problem]:
    """`weights.transport: nccl` needs GPUs."""
    if config.placement.device == "cpu" and config.weights.transport == "nccl":
        yield _problem(config, "weights.transport", "nccl needs GPUs, and placement.device is cpu", "Use auto, or gloo")


def memory_settings_fit_the_device(config: Config) -> Iterator[Problem]:
    """`rollout.gpu_memory_utilization` is for `placement.device: cuda` and `rollout.kv_cache_bytes` for `cpu`.

    With `auto` both may stand, so that one file serves both.
    """
    device = config.placement.device
    settable = {"cpu": "gpu_memory_utilization", "cuda": "kv_cache_bytes"}
    key = settable.get(device)
    if key is not None and key in config.rollout.model_fields_set and not _is_default(config.rollout, key):
        yield _problem(config, f"rollout.{key}", f"has no effect while placement.device is {device}", "Leave it out")


def system_prompt_has_a_template(config: Config) -> Iterator[Problem]:
    """`data.system_prompt` needs `data.chat_template: true`."""
    if config.data.system_prompt is not None and not config.data.chat_template:
        yield _problem(
            config,
            "data.system_prompt",
            "has no effect while data.chat_template is false: only a chat template has a place for it",
            "Set data.chat_template: true, or put the text into the prompts",
        )


def problem_options_stand_once(config: Config) -> Iterator[Problem]:
    """`size` and `seed` of reasoning-gym problems are keys of their own, not among the task's options."""
    for section in ("data", "evaluation"):
        prompts = getattr(getattr(config, section), "prompts", None)
        if isinstance(prompts, ReasoningGymPrompts):
            for name in {"size", "seed"} & prompts.options.keys():
                yield _problem(
                    config,
                    f"{section}.prompts.options.{name}",
                    "is a key of its own and not an option of the task",
                    f"Did you mean {section}.prompts.{name}?",
                )


def reward_functions_exist(config: Config) -> Iterator[Problem]:
    """A reward function is a built-in, `module:function` or `path/to/file.py:function`.

    A plain name that resembles no built-in passes here: it may be a function that a Python program hands to the
    trainer, which refuses it otherwise.
    """
    for index, function in enumerate(config.reward.functions):
        module, colon, name = function.name.rpartition(":")
        if function.name in BUILT_IN_REWARDS or (colon and module and name.isidentifier()):
            continue
        near = nearest(function.name, BUILT_IN_REWARDS, cutoff=0.82)
        if near is not None or not function.name.isidentifier():
            yield _problem(
                config,
                f"reward.functions.{index}.name",
                f"must be a built-in ({', '.join(BUILT_IN_REWARDS)}), module:function or path/to/file.py:function",
                f"Did you mean {near}?" if near else "",
            )


def reward_functions_fit_the_data(config: Config) -> Iterator[Problem]:
    """The reward `reasoning_gym` scores reasoning-gym problems only."""
    for index, function in enumerate(config.reward.functions):
        for section in ("data", "evaluation"):
            prompts = getattr(getattr(config, section), "prompts", None)
            if function.name == "reasoning_gym" and prompts is not None and prompts.source != "reasoning_gym":
                yield _problem(
                    config,
                    f"reward.functions.{index}.name",
                    f"reasoning_gym scores its own problems only, and {section}.prompts.source is {prompts.source}",
                    "Use exact_match, regex or a function of your own",
                )


def some_reward_trains(config: Config) -> Iterator[Problem]:
    """At least one reward function has a weight other than 0."""
    if all(function.weight == 0 for function in config.reward.functions):
        yield _problem(
            config,
            "reward.functions",
            "every weight is 0, so every reward is 0 and nothing is learned",
            "Give at least one function another weight",
        )


RULES: tuple[Rule, ...] = (
    sampling_can_be_trained_on,
    group_is_large_enough,
    kl_settings_have_an_effect,
    clip_has_an_effect,
    reference_is_needed,
    deterministic_is_possible,
    warmup_ends_before_the_run,
    every_update_has_samples,
    transport_fits_the_device,
    memory_settings_fit_the_device,
    system_prompt_has_a_template,
    problem_options_stand_once,
    reward_functions_exist,
    reward_functions_fit_the_data,
    some_reward_trains,
)


def device_problems(config: Config, device: Literal["cpu", "cuda"]) -> list[Problem]:
    """What doesn't go with the device that `placement.device: auto` has come to."""
    resolved = config.model_copy(update={"placement": config.placement.model_copy(update={"device": device})})
    return [*deterministic_is_possible(resolved), *transport_fits_the_device(resolved)]


def _is_default(section: Any, key: str) -> bool:
    return bool(getattr(section, key) == type(section).model_fields[key].default)


def _problem(config: Config, key: str, rule: str, hint: str) -> Problem:
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else value[part] if isinstance(value, dict) else getattr(value, part)
    return Problem(key, rule, ABSENT if not isinstance(value, str | int | float) else value, hint)
