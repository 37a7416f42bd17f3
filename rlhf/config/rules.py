"""Rules that concern several keys, or a value together with what the algorithms can do.

Each rule is a small function from a valid configuration to the problems that it finds; its docstring is its entry in
the documentation. A value is refused when it can't train, when it contradicts another, or when it was set to
something that will not happen: nothing is switched or ignored in silence. Those about algorithms stand in
`rlhf.config.rules_algorithm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rlhf.config.catalogue import BUILT_IN_REWARDS, needs_critic
from rlhf.config.problems import Problem
from rlhf.config.rules_algorithm import ALGORITHM_RULES
from rlhf.config.rules_checkpoint import CHECKPOINT_RULES
from rlhf.config.rules_common import Rule, is_set, problem, unused
from rlhf.config.rules_lora import LORA_RULES
from rlhf.config.rules_rollout import ROLLOUT_RULES
from rlhf.config.schema import Config, LearnerConfig, ReasoningGymPrompts
from rlhf.config.suggest import nearest


def check(config: Config) -> list[Problem]:
    """Everything that the rules find wrong."""
    return [found for rule in RULES for found in rule(config)]


def deterministic_is_possible(config: Config) -> Iterator[Problem]:
    """`run.deterministic` needs `model.dtype: float32` and a CPU, and neither stop strings nor dynamic sampling."""
    if not config.run.deterministic:
        return
    if config.model.dtype != "float32":
        yield problem(
            config,
            "model.dtype",
            "run.deterministic promises results that repeat bit for bit, and that is kept in float32 only",
            "Set model.dtype: float32, or run.deterministic: false",
        )
    if config.placement.device == "cuda":
        yield problem(
            config,
            "placement.device",
            "run.deterministic promises results that repeat bit for bit, and that is kept on CPU only",
            "Set placement.device: cpu, or run.deterministic: false",
        )
    if config.rollout.sampling.stop:
        yield problem(
            config,
            "rollout.sampling.stop",
            "with run.deterministic responses end by their ids: a stop string is found outside of vLLM's loop, and "
            "when it is found decides what is computed together",
            "Use rollout.sampling.stop_token_ids, or set run.deterministic: false",
        )
    if config.rollout.dynamic_sampling.enabled:
        yield problem(
            config,
            "rollout.dynamic_sampling.enabled",
            "with run.deterministic all of a step is generated together, and not some of it later in place of others",
            "Set it to false, or run.deterministic: false",
        )


def warmup_ends_before_the_run(config: Config) -> Iterator[Problem]:
    """`policy.warmup_steps` and `critic.warmup_steps` are below `run.steps`."""
    for name, learner in _learners(config):
        if learner.warmup_steps >= config.run.steps:
            yield problem(
                config,
                f"{name}.warmup_steps",
                f"the warm-up would not end within run.steps = {config.run.steps}",
                f"Use at most {config.run.steps - 1}",
            )


def every_update_has_samples(config: Config) -> Iterator[Problem]:
    """Each update of policy and critic has at least one sample for every rank, or group of ranks that share rows.

    An update gets prompts_per_step x samples_per_prompt / minibatches samples.
    """
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    for name, learner in _learners(config):
        parts = learner.minibatches * learner.data_ranks
        shared = f" / {name}.sequence_parallel {learner.sequence_parallel}" if learner.sequence_parallel > 1 else ""
        if samples < parts:
            yield problem(
                config,
                f"{name}.minibatches" if learner.minibatches > 1 else f"{name}.ranks",
                f"a step has {rollout.prompts_per_step} x {rollout.samples_per_prompt} = {samples} samples, and "
                f"{name}.minibatches {learner.minibatches} x {name}.ranks {learner.ranks}{shared} = {parts} parts of "
                "at least one sample don't come out of it",
                f"Lower {name}.minibatches or {name}.ranks, or sample more",
            )


def refused_sequences_can_not_come(config: Config) -> Iterator[Problem]:
    """With `longer_sequences: refuse` the longest sequence of the run fits into a micro-batch.

    The longest has data.max_prompt_tokens + rollout.max_new_tokens.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    for name, learner in _learners(config):
        cap = learner.max_tokens_per_microbatch
        if learner.longer_sequences == "refuse" and prompt + response > cap:
            yield problem(
                config,
                f"{name}.max_tokens_per_microbatch",
                f"a sequence may have {prompt} + {response} = {prompt + response} tokens, and "
                f"{name}.longer_sequences is refuse",
                f"Use at least {prompt + response}, lower data.max_prompt_tokens or rollout.max_new_tokens, or set "
                f"{name}.longer_sequences: alone",
            )


def offloaded_states_are_sharded(config: Config) -> Iterator[Problem]:
    """`offload` needs `zero_stage: 3`."""
    for name, learner in _learners(config):
        if learner.offload != "none" and learner.zero_stage != 3:
            yield problem(
                config,
                f"{name}.offload",
                f"needs {name}.zero_stage 3: below it weights can't be offloaded, and DeepSpeed would add up offloaded "
                "gradients in the dtype of the model and not in float32",
                f"Set {name}.zero_stage: 3, or {name}.offload: none",
            )


def states_on_a_disk_are_offloaded_and_in_no_checkpoint(config: Config) -> Iterator[Problem]:
    """`offload_to: disk` needs `offload`, and `checkpoint.every: 0`.

    DeepSpeed loads the state's files from a checkpoint without Adam's count of steps: a run would go on, and wrongly.
    """
    for name, learner in _learners(config):
        if learner.offload_to == "disk" and learner.offload == "none":
            yield problem(
                config,
                f"{name}.offload_to",
                f"while {name}.offload is none there is nothing to lie on a disk",
                f"Set {name}.offload: optimizer, or leave {name}.offload_to out",
            )
        elif learner.offload_to == "disk" and config.checkpoint.every > 0:
            yield problem(
                config,
                f"{name}.offload_to",
                "optimizer state on a disk can't be in a checkpoint: DeepSpeed doesn't load it as it was saved",
                f"Set {name}.offload_to: host, or checkpoint.every: 0 for a run that can't be resumed",
            )


def _learners(config: Config) -> Iterator[tuple[str, LearnerConfig]]:
    """The learners that the run starts; of a critic that isn't, `critic_is_needed` refuses every setting."""
    yield "policy", config.policy
    if needs_critic(config):
        yield "critic", config.critic


def sharding_has_several_ranks(config: Config) -> Iterator[Problem]:
    """`reference.sharded` and `reward.model.sharded` need several ranks: on one there is nothing to shard over."""
    for key, section in (("reference", config.reference), ("reward.model", config.reward.model)):
        if section is not None and section.sharded and section.ranks == 1:
            yield problem(
                config,
                f"{key}.sharded",
                f"has no effect while {key}.ranks is 1",
                f"Raise {key}.ranks, or leave it out",
            )


def sequence_groups_are_whole(config: Config) -> Iterator[Problem]:
    """`sequence_parallel` divides `ranks`."""
    for name, learner in _learners(config):
        ranks, sharing = learner.ranks, learner.sequence_parallel
        if ranks % sharing:
            yield problem(
                config,
                f"{name}.sequence_parallel",
                f"so many ranks share each row, and {name}.ranks = {ranks} = {ranks // sharing} x {sharing} + "
                f"{ranks % sharing} leaves some without a group",
                f"Use {name}.ranks: {-(-ranks // sharing) * sharing}, or {name}.sequence_parallel: "
                f"{max(size for size in range(1, sharing) if ranks % size == 0)}",
            )


def transport_fits_the_device(config: Config) -> Iterator[Problem]:
    """`weights.transport: nccl` needs GPUs."""
    if config.placement.device == "cpu" and config.weights.transport == "nccl":
        yield problem(config, "weights.transport", "nccl needs GPUs, and placement.device is cpu", "Use auto, or gloo")


def memory_settings_fit_the_device(config: Config) -> Iterator[Problem]:
    """`rollout.gpu_memory_utilization` is for `placement.device: cuda` and `rollout.kv_cache_bytes` for `cpu`.

    With `auto` both may stand, so that one file serves both.
    """
    device = config.placement.device
    settable = {"cpu": "gpu_memory_utilization", "cuda": "kv_cache_bytes"}
    key = settable.get(device)
    if key is not None and is_set(config.rollout, key):
        yield problem(config, f"rollout.{key}", f"has no effect while placement.device is {device}", "Leave it out")


def system_prompt_has_a_template(config: Config) -> Iterator[Problem]:
    """`data.system_prompt` needs `data.chat_template: true`."""
    if config.data.system_prompt is not None and not config.data.chat_template:
        yield problem(
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
                yield problem(
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
            yield problem(
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
                yield problem(
                    config,
                    f"reward.functions.{index}.name",
                    f"reasoning_gym scores its own problems only, and {section}.prompts.source is {prompts.source}",
                    "Use exact_match, regex or a function of your own",
                )


def some_reward_trains(config: Config) -> Iterator[Problem]:
    """There is at least one reward function or a reward model, and one of them has a weight other than 0."""
    reward = config.reward
    weights = [source.weight for source in (*reward.functions, reward.model) if source is not None]
    if not weights:
        yield problem(
            config,
            "reward.functions",
            "there is neither a reward function nor a reward model, so nothing is learned",
            f"Set reward.functions (built-in: {', '.join(BUILT_IN_REWARDS)}), or reward.model.path",
        )
    elif not any(weights):
        yield problem(
            config,
            "reward.functions" if reward.functions else "reward.model.weight",
            "every weight is 0, so every reward is 0 and nothing is learned",
            "Give at least one function or the reward model another weight",
        )


def reward_workers_have_functions(config: Config) -> Iterator[Problem]:
    """`reward.workers` and `reward.timeout_s` are set only where there are reward functions."""
    if not config.reward.functions:
        keys = ["reward.workers", "reward.timeout_s"]
        yield from unused(
            config,
            keys,
            "without reward functions",
            "Leave it out; a reward model has reward.model.ranks and deadline_s",
        )


def overlong_punishment_fits(config: Config) -> Iterator[Problem]:
    """`overlong_buffer` is at most `rollout.max_new_tokens`, and `overlong_penalty` needs a buffer."""
    shaping, longest = config.reward.shaping, config.rollout.max_new_tokens
    if shaping.overlong_buffer > longest:
        yield problem(
            config,
            "reward.shaping.overlong_buffer",
            f"the penalty grows over that many tokens, and rollout.max_new_tokens is {longest}",
            f"Use at most {longest}",
        )
    if shaping.overlong_buffer == 0:
        yield from unused(
            config,
            ["reward.shaping.overlong_penalty"],
            "while reward.shaping.overlong_buffer is 0",
            "Set the number of tokens over which it grows, or leave it out",
        )


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    *ROLLOUT_RULES,
    *CHECKPOINT_RULES,
    *LORA_RULES,
    sharding_has_several_ranks,
    sequence_groups_are_whole,
    deterministic_is_possible,
    warmup_ends_before_the_run,
    every_update_has_samples,
    refused_sequences_can_not_come,
    offloaded_states_are_sharded,
    states_on_a_disk_are_offloaded_and_in_no_checkpoint,
    transport_fits_the_device,
    memory_settings_fit_the_device,
    system_prompt_has_a_template,
    problem_options_stand_once,
    reward_functions_exist,
    reward_functions_fit_the_data,
    some_reward_trains,
    reward_workers_have_functions,
    overlong_punishment_fits,
)


def device_problems(config: Config, device: Literal["cpu", "cuda"]) -> list[Problem]:
    """What doesn't go with the device that `placement.device: auto` has come to."""
    resolved = config.model_copy(update={"placement": config.placement.model_copy(update={"device": device})})
    return [*deterministic_is_possible(resolved), *transport_fits_the_device(resolved)]
