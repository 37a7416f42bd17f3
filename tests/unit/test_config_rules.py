"""Rules between keys of a run, its data, its learners and its rewards."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.catalogue import BUILT_IN_REWARDS
from rlhf.rewards.builtin import BUILT_IN
from tests.unit.configs import build, refusals

REWARD_MODEL = {"path": "org/rm"}


def test_the_catalogue_has_every_reward_function_that_is_built_in() -> None:
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS


def test_deterministic_runs_need_float32_and_a_cpu() -> None:
    found = refusals({"run.deterministic": True, "placement.device": "cuda"})
    assert "float32" in found["model.dtype"]
    assert "CPU" in found["placement.device"]
    assert build({"run.deterministic": True, "model.dtype": "float32", "rollout.engines": 2}).run.deterministic


def test_what_timing_decides_is_refused_in_deterministic_runs() -> None:
    deterministic = {"run.deterministic": True, "model.dtype": "float32"}
    stop = "rollout.sampling.stop"
    assert "outside of vLLM's loop" in refusals({**deterministic, stop: ["###"]})[stop]
    assert build({**deterministic, f"{stop}_token_ids": [5]}).run.deterministic
    key = "rollout.dynamic_sampling.enabled"
    assert "generated together" in refusals({**deterministic, key: True})[key]


def test_a_warm_up_ends_before_the_run() -> None:
    assert "run.steps = 5" in refusals({"run.steps": 5, "policy.warmup_steps": 5})["policy.warmup_steps"]
    assert build({"run.steps": 5, "policy.warmup_steps": 4}).policy.warmup_steps == 4


def test_an_update_without_a_sample_for_every_rank_is_refused_with_the_arithmetic() -> None:
    # 2 prompts x 2 samples = 4 samples; 3 minibatches x 2 ranks want 6.
    changes = {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2}
    found = refusals({**changes, "policy.minibatches": 3, "policy.ranks": 2})
    assert "2 x 2 = 4 samples" in found["policy.minibatches"]
    assert "= 6 parts" in found["policy.minibatches"]
    assert build({**changes, "policy.minibatches": 2, "policy.ranks": 2}).policy.ranks == 2


def test_a_hard_cap_below_the_longest_sequence_is_refused_with_the_arithmetic() -> None:
    # 100 + 24 = 124 tokens.
    changes = {"data.max_prompt_tokens": 100, "rollout.max_new_tokens": 24, "policy.max_tokens_per_microbatch": 123}
    assert build(changes).policy.longer_sequences == "alone"
    found = refusals({**changes, "policy.longer_sequences": "refuse"})
    assert list(found) == ["policy.max_tokens_per_microbatch"]
    assert "100 + 24 = 124 tokens" in found["policy.max_tokens_per_microbatch"]
    assert "at least 124" in found["policy.max_tokens_per_microbatch"]
    assert build({**changes, "policy.longer_sequences": "refuse", "policy.max_tokens_per_microbatch": 124})


def test_a_hard_cap_of_the_critic_is_its_own() -> None:
    critic = {"critic.longer_sequences": "refuse", "critic.max_tokens_per_microbatch": 10}
    found = refusals({"algorithm.advantage": "gae", "data.max_prompt_tokens": 100, **critic})
    assert "critic.longer_sequences is refuse" in found["critic.max_tokens_per_microbatch"]


@pytest.mark.parametrize("offload", ["optimizer", "optimizer_and_parameters"])
def test_offload_needs_zero_3(offload: str) -> None:
    for stage in (1, 2):
        found = refusals({"policy.offload": offload, "policy.zero_stage": stage})
        assert "needs policy.zero_stage 3" in found["policy.offload"]
    assert build({"policy.offload": offload, "policy.zero_stage": 3}).policy.offload == offload


def test_a_state_on_a_disk_is_offloaded_and_in_no_checkpoint() -> None:
    disk = {"policy.offload_to": "disk", "policy.zero_stage": 3}
    assert "policy.offload is none" in refusals(disk)["policy.offload_to"]
    found = refusals({**disk, "policy.offload": "optimizer", "checkpoint.every": 5})
    assert "can't be in a checkpoint" in found["policy.offload_to"]
    assert build({**disk, "policy.offload": "optimizer"}).policy.offload_to == "disk"


def test_settings_of_another_device_are_refused() -> None:
    found = refusals(
        {
            "placement.device": "cpu",
            "weights.transport": "nccl",
            "rollout.gpu_memory_utilization": 0.5,
        }
    )
    assert "nccl needs GPUs" in found["weights.transport"]
    assert "no effect while placement.device is cpu" in found["rollout.gpu_memory_utilization"]
    assert "no effect" in refusals({"placement.device": "cuda", "rollout.kv_cache_bytes": 5})["rollout.kv_cache_bytes"]


def test_a_system_prompt_without_a_template_is_refused() -> None:
    found = refusals({"data.system_prompt": "Be brief.", "data.chat_template": False})
    assert "has no effect while data.chat_template is false" in found["data.system_prompt"]


def test_size_and_seed_among_the_options_of_a_task_are_refused() -> None:
    prompts = {"source": "reasoning_gym", "task": "chain_sum", "options": {"size": 5}}
    found = refusals({"data.prompts": prompts})
    assert "Did you mean data.prompts.size?" in found["data.prompts.options.size"]


@pytest.mark.parametrize(
    ("name", "near"), [("exact_mach", "exact_match"), ("regx", "regex"), ("reasoning-gym", "reasoning_gym")]
)
def test_a_mistyped_reward_function_is_refused_with_the_nearest(name: str, near: str) -> None:
    found = refusals({"reward.functions": [{"name": name}]})
    assert f"Did you mean {near}?" in found["reward.functions.0.name"]


@pytest.mark.parametrize("name", ["my.module:score", "rewards/mine.py:score", "brevity"])
def test_own_reward_functions_are_accepted(name: str) -> None:
    assert build({"reward.functions": [{"name": name}]}).reward.functions[0].name.endswith(name.rpartition("/")[2])


def test_the_reasoning_gym_score_is_refused_for_other_data() -> None:
    found = refusals({"data.prompts": {"source": "jsonl", "path": "x.jsonl"}})
    assert "data.prompts.source is jsonl" in found["reward.functions.0.name"]


def test_rewards_of_weight_zero_alone_are_refused() -> None:
    assert "nothing is learned" in refusals({"reward.functions": [{"name": "length", "weight": 0}]})["reward.functions"]


def test_the_warm_up_of_a_critic_ends_before_the_run() -> None:
    changes: dict[str, Any] = {"run.steps": 5, "algorithm.advantage": "gae"}
    assert "Use at most 4" in refusals({**changes, "critic.warmup_steps": 5})["critic.warmup_steps"]
    assert build({**changes, "critic.warmup_steps": 4}).critic.warmup_steps == 4


def test_ranks_that_share_rows_need_one_sample_together() -> None:
    # 1 prompt x 2 samples; 4 ranks / 2 = 2 shares of a batch, in 2 minibatches 4.
    changes = {"rollout.prompts_per_step": 1, "rollout.samples_per_prompt": 2, "policy.ranks": 4}
    assert build({**changes, "policy.sequence_parallel": 2}).policy.data_ranks == 2
    found = refusals({**changes, "policy.sequence_parallel": 2, "policy.minibatches": 2})
    assert (
        "policy.minibatches 2 x policy.ranks 4 / policy.sequence_parallel 2 = 4 parts" in (found["policy.minibatches"])
    )
    assert "policy.ranks 4 = 4 parts" in refusals(changes)["policy.ranks"]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_ranks_that_sequence_groups_do_not_divide_are_refused_with_the_nearest_that_do(role: str) -> None:
    changes = {"algorithm.advantage": "gae", "algorithm.normalize": "group", f"{role}.ranks": 6}
    assert build({**changes, f"{role}.sequence_parallel": 3}).policy.sequence_parallel == (3 if role == "policy" else 1)
    message = refusals({**changes, f"{role}.sequence_parallel": 4})[f"{role}.sequence_parallel"]
    assert f"{role}.ranks = 6 = 1 x 4 + 2 leaves some without a group" in message
    assert f"Use {role}.ranks: 8, or {role}.sequence_parallel: 3" in message


def test_an_update_of_the_critic_without_a_sample_for_every_rank_is_refused() -> None:
    # 2 prompts x 1 sample = 2 samples; the critic's 3 ranks want 3.
    changes: dict[str, Any] = {
        "algorithm.advantage": "gae",
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 1,
    }
    message = refusals({**changes, "critic.ranks": 3})["critic.ranks"]
    assert "2 x 1 = 2 samples" in message
    assert "Lower critic.minibatches or critic.ranks" in message
    assert build({**changes, "critic.ranks": 2}).critic.ranks == 2


def test_sharding_over_one_rank_is_refused() -> None:
    kl = {"algorithm.kl": {"where": "loss", "coefficient": 0.1}}
    found = refusals({**kl, "reference.sharded": True, "reward.model": {**REWARD_MODEL, "sharded": True}})
    assert "Raise reference.ranks" in found["reference.sharded"]
    assert "has no effect while reward.model.ranks is 1" in found["reward.model.sharded"]
    assert build({**kl, "reference": {"sharded": True, "ranks": 2}})
    assert build({"reward.model": {**REWARD_MODEL, "sharded": True, "ranks": 2}})


def test_a_run_without_any_reward_is_refused() -> None:
    found = refusals({"reward": {}})
    assert "neither a reward function nor a reward model" in found["reward.functions"]
    assert "Set reward.functions (built-in: reasoning_gym" in found["reward.functions"]


def test_a_reward_model_alone_is_enough() -> None:
    config = build({"reward": {"model": REWARD_MODEL}})
    assert config.reward.functions == []
    assert config.reward.model is not None


def test_one_weight_other_than_zero_is_enough() -> None:
    silent = {**REWARD_MODEL, "weight": 0}
    assert "another weight" in refusals({"reward": {"model": silent}})["reward.model.weight"]
    idle = [{"name": "length", "weight": 0}]
    assert "nothing is learned" in refusals({"reward": {"functions": idle, "model": silent}})["reward.functions"]
    assert build({"reward": {"functions": idle, "model": REWARD_MODEL}})


@pytest.mark.parametrize("setting", [{"workers": 2}, {"timeout_s": 5}])
def test_settings_of_reward_functions_are_refused_where_there_are_none(setting: dict[str, float]) -> None:
    (key,) = setting
    assert (
        "no effect without reward functions"
        in refusals({"reward": {"model": REWARD_MODEL, **setting}})[f"reward.{key}"]
    )
    assert build({"reward.model": REWARD_MODEL, f"reward.{key}": setting[key]})


def test_an_overlong_buffer_fits_into_the_response() -> None:
    changes = {"rollout.max_new_tokens": 8}
    found = refusals({**changes, "reward.shaping.overlong_buffer": 9})
    assert "rollout.max_new_tokens is 8. Use at most 8" in found["reward.shaping.overlong_buffer"]
    assert build({**changes, "reward.shaping.overlong_buffer": 8})


def test_an_overlong_penalty_needs_a_buffer() -> None:
    found = refusals({"reward.shaping.overlong_penalty": 2.0})
    assert "while reward.shaping.overlong_buffer is 0" in found["reward.shaping.overlong_penalty"]
    assert "Set the number of tokens" in found["reward.shaping.overlong_penalty"]
    assert build({"reward.shaping": {"overlong_buffer": 4, "overlong_penalty": 2.0}})
