"""Needs and preflight: the arithmetic of devices and bytes, worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.cluster import needs as needs_module
from rlhf.cluster.needs import ModelShape, Needs, UnknownShape, needs
from rlhf.cluster.needs_table import render_table, size
from rlhf.cluster.preflight import Node, Refused, Resources, preflight, resolve_device
from rlhf.config import Config, config_from_dict, load_config

GIB = 1 << 30

# hidden 8, 2 layers, 4 heads of 2, 2 KV heads, MLP 16, vocabulary 10, tied.
# One layer: q 8x8 + k, v 2 x 8x4 + o 8x8 = 192; MLP 3 x 8x16 = 384; two norms 16: 592.
# Model: 2 x 592 + embedding 10x8 + last norm 8 = 1272.
SMALL = ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocab=10, tied=True)

SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}, "max_prompt_tokens": 6},
        "reward": {"functions": [{"name": "reasoning_gym"}], "workers": 3},
        "model": {"dtype": "bfloat16"},
        "rollout": {"samples_per_prompt": 6, "max_new_tokens": 4, "kv_cache_bytes": 4096},
        "policy": {"max_tokens_per_microbatch": 32},
        "weights": {"bucket_bytes": 1000},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return config_from_dict(base, check_files=False)


def test_parameters_of_smollm2_are_counted_from_its_config() -> None:
    # Layer: 2 x 576^2 + 2 x 576x192 + 3 x 576x1536 + 2 x 576 = 3,540,096; 30 of them 106,202,880;
    # embedding 49152 x 576 = 28,311,552; last norm 576: 134,515,008, which is what the checkpoint holds.
    assert ModelShape.from_config(SMOLLM2, "config.json").parameters == 134_515_008


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_agree_with_transformers(architecture: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    made = transformers.AutoConfig.for_model(
        architecture,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    shape = ModelShape.from_config(made.to_dict(), "config.json")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_folder_without_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownShape, match=r"config\.json: no such file.*model\.path"):
        ModelShape.from_path(tmp_path)


def test_a_config_without_sizes_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "hidden_size": None}))
    with pytest.raises(UnknownShape, match="hidden_size"):
        ModelShape.from_path(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownShape, match="no such folder"):
        ModelShape.from_path(tmp_path / "models" / "missing")


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(UnknownShape, match="num_local_experts = 8"):
        ModelShape.from_config({**SMOLLM2, "num_local_experts": 8}, "config.json")


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        # 1272 parameters on 2 ranks: bfloat16 weights 2544, float32 gradients 5088, masters and moments 15264.
        # At stage 1 the gradients are there in bfloat16 as well, 2544.
        (1, 2544, 5088 + 2544, 7632),
        (2, 2544, 2544, 7632),
        # The model is smaller than what may be whole at a time: 2544 more.
        (3, 1272 + 2544, 2544, 7632),
    ],
)
def test_zero_stages_shard_optimizer_then_gradients_then_weights(
    stage: int, weights: int, gradients: int, optimizer: int
) -> None:
    pool = needs(config(policy={"ranks": 2, "zero_stage": stage}), SMALL).pool("policy")
    assert pool is not None
    assert (pool.bytes.weights, pool.bytes.gradients, pool.bytes.optimizer) == (weights, gradients, optimizer)


def test_policy_activations_follow_the_formula() -> None:
    # A layer and token: norms 2 x (4 + 2) x 8 = 96; 2 x (2 x 8 + 4 x 16) = 160. Attention: its output 2 x 8; in float32
    # queries and output 4 x 2 x 8, keys and values 4 x 2 x 4 in the row, and for 6 samples with prompts of their own,
    # 6 x (6 + 4) tokens in place of 6 + 6 x 4, twice that: 176. Together 432.
    # 32 tokens, 2 layers: 27648. Logits: 3 float32 arrays of 32 x 10: 3840. Head gradient: 4 x 80 = 320. All gradients
    # in the buffer that they are reduced from: 4 x 1272 = 5088.
    pool = needs(config(), SMALL).pool("policy")
    assert pool is not None
    assert pool.bytes.activations == 27648 + 3840 + 320 + 5088


def test_on_cpu_the_heap_keeps_two_fifths_of_what_layers_keep() -> None:
    # Of 27648 bytes, see above; with adapters of rank 3 at 7 layers 2688 more; with the policy's settings the critic's
    # layers keep the same.
    settings = {"lora": {"rank": 3}}
    adapted, gpu = needs(config(policy=settings), SMALL), needs(config(), SMALL, "cuda")
    plain = needs(config(algorithm={"advantage": "gae"}, critic={"max_tokens_per_microbatch": 32}), SMALL)
    found = [whole.pool("policy") for whole in (plain, adapted, gpu)]
    assert [pool.bytes.heap for pool in found if pool is not None] == [11059, int(0.4 * (27648 + 2688)), 0]
    critic = plain.pool("critic")
    assert critic is not None and critic.bytes.heap == 11059


def test_on_cpu_the_heap_keeps_what_stage_3_gathers_as_well() -> None:
    # All 1272 parameters in bfloat16: 2544.
    policy, gpu = (needs(config(policy={"zero_stage": 3}), SMALL, device).pool("policy") for device in ("cpu", "cuda"))
    assert policy is not None and gpu is not None
    assert (policy.bytes.heap, gpu.bytes.heap) == (11059 + 2544, 0)


def test_on_gpus_attention_keeps_the_row_in_the_models_dtype() -> None:
    # Queries and keys before and after rotation, values, output: 2 x (3 x 8 + 3 x 4) = 72 in place of 176.
    cpu, gpu = (needs(config(), SMALL, device).pool("policy") for device in ("cpu", "cuda"))
    assert cpu is not None and gpu is not None
    assert cpu.bytes.activations - gpu.bytes.activations == 32 * 2 * (176 - 72)


# Float32 buffers of 50 million elements; a rank that is alone sends nothing.
@pytest.mark.parametrize(("stage", "ranks", "reduced"), [(2, 2, 5088), (3, 1, 200_000_000), (3, 2, 400_000_000)])
def test_gradients_are_reduced_from_a_buffer(stage: int, ranks: int, reduced: int) -> None:
    pool = needs(config(policy={"zero_stage": stage, "ranks": ranks}), SMALL).pool("policy")
    assert pool is not None
    assert pool.bytes.activations == 27648 + 3840 + 320 + reduced


def test_of_a_large_model_only_a_part_is_whole_at_stage_3() -> None:
    # SmolLM2 with 8 times the layers: 240 x 3,540,096 + 28,311,552 + 576 = 877,935,168 bfloat16 parameters, of which
    # the embedding (28,311,552) and 100 million are whole.
    shape = ModelShape.from_config({**SMOLLM2, "num_hidden_layers": 240}, "config.json")
    assert shape.parameters == 877_935_168
    pool = needs(config(policy={"zero_stage": 3, "ranks": 4}), shape).pool("policy")
    assert pool is not None
    assert pool.bytes.weights == 2 * 877_935_168 // 4 + 2 * 128_311_552


def test_what_is_counted_for_stage_3_is_what_deepspeed_is_told() -> None:
    from rlhf.learners import offload, zero
    from rlhf.models import distributed

    assert needs_module.NEAR_ELEMENTS == distributed.AHEAD_ELEMENTS + distributed.KEPT_ELEMENTS
    assert needs_module.REDUCE_BUCKET_ELEMENTS == zero.REDUCE_BUCKET_ELEMENTS
    assert needs_module.SUB_GROUP_ELEMENTS == offload.SUB_GROUP_ELEMENTS


def test_checkpointed_activations_are_the_inputs_of_all_layers_and_one_layer_in_full() -> None:
    # 32 tokens, bfloat16: inputs 2 layers x 8 x 2 = 32 bytes a token, and 432 for the layer that is computed again:
    # 14848. Logits and the head's gradient as without.
    pool = needs(config(policy={"activation_checkpointing": True}), SMALL).pool("policy")
    assert pool is not None
    assert pool.bytes.activations == 14848 + 3840 + 320 + 5088


def test_a_critic_checkpoints_activations_by_its_own_setting() -> None:
    # 16 tokens x (32 + 432) = 7424, no logits; 4 x 1280 in the buffer of the gradients.
    settings = {"max_tokens_per_microbatch": 16, "activation_checkpointing": True}
    pool = needs(config(algorithm={"advantage": "gae"}, critic=settings), SMALL).pool("critic")
    assert pool is not None
    assert pool.bytes.activations == 7424 + 5120


def test_a_sequence_longer_than_the_cap_sets_the_activations() -> None:
    long = needs(config(data={"max_prompt_tokens": 60}), SMALL).pool("policy")
    capped = needs(config(data={"max_prompt_tokens": 60}, policy={"max_tokens_per_microbatch": 64}), SMALL).pool(
        "policy"
    )
    assert long is not None and capped is not None
    assert long.bytes.activations == capped.bytes.activations


def test_both_sides_have_a_bucket_on_the_wire_and_one_in_the_making() -> None:
    whole = needs(config(), SMALL)
    policy, rollout = whole.pool("policy"), whole.pool("rollout")
    assert policy is not None and rollout is not None
    assert policy.bytes.sync_buckets == rollout.bytes.sync_buckets == 2 * 1000


def test_zero_3_gathers_a_layer_in_place_of_the_second_bucket() -> None:
    # The bucket of 1000 bytes is larger than the embedding (160 bytes); a layer of 592 parameters is 1184 bytes.
    pool = needs(config(policy={"zero_stage": 3}), SMALL).pool("policy")
    assert pool is not None
    assert pool.bytes.sync_buckets == 1000 + 1184


def test_tensor_parallel_divides_weights_and_takes_a_device_each() -> None:
    pool = needs(config(rollout={"engines": 3, "tensor_parallel": 2}), SMALL).pool("rollout")
    assert pool is not None
    assert (pool.units, pool.devices_per_unit, pool.devices) == (3, 2, 6)
    assert pool.bytes.weights == 1272
    assert pool.bytes.kv_cache == 4096


def test_a_gpu_engine_needs_at_least_the_longest_sequence_in_its_cache() -> None:
    # 2 (key, value) x 2 layers x 2 KV heads x 2 x 2 bytes = 32 bytes a token; 6 + 4 tokens.
    pool = needs(config(), SMALL, "cuda").pool("rollout")
    assert pool is not None
    assert pool.bytes.kv_cache == 320


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        # Adapters of rank 3 beside a layer's projections, 3 x (inputs + outputs): q and o 2 x 16, k and v 2 x 12, three
        # of 24, together 3 x 128 = 384; two layers 768. On 2 ranks: bfloat16 weights 2 x 1272 + 2 x 768, float32
        # gradients 4 x 768, masters and moments 12 x 768.
        (1, 2544 + 1536, 3072 + 1536, 4608),
        (2, 2544 + 1536, 1536, 4608),
        (3, 1272 + 768 + 2544, 1536, 4608),
    ],
)
def test_with_adapters_gradients_and_optimizer_are_theirs_alone(
    stage: int, weights: int, gradients: int, optimizer: int
) -> None:
    made = config(policy={"ranks": 2, "zero_stage": stage, "lora": {"rank": 3}}, checkpoint={"every": 5})
    pool = needs(made, SMALL).pool("policy")
    assert pool is not None
    assert (pool.bytes.weights, pool.bytes.gradients, pool.bytes.optimizer) == (weights, gradients, optimizer)
    # A checkpoint has the adapters and their optimizer.
    assert pool.bytes.checkpoint == weights - (2544 if stage < 3 else 1272 + 2544) + optimizer


def test_with_adapters_the_head_has_no_gradient_and_a_merged_matrix_is_made_at_a_time() -> None:
    plain = needs(config(), SMALL).pool("policy")
    adapted = needs(config(policy={"lora": {"rank": 3}}), SMALL).pool("policy")
    assert plain is not None and adapted is not None
    # Less 4 x 80 for the head's gradient and 4 x (1272 - 768) in the buffer of the gradients; 32 tokens x 2 layers x
    # 7 adapters x 3 outputs of 2 bytes more.
    assert adapted.bytes.activations - plain.bytes.activations == 32 * 2 * 7 * 3 * 2 - 320 - 2016
    # The largest matrices are 8 x 16, in float32.
    assert adapted.bytes.sync_buckets - plain.bytes.sync_buckets == 4 * 128


def test_named_targets_alone_are_counted_and_all_where_a_name_is_unknown() -> None:
    counted = {}
    for targets in (["q_proj", "down_proj"], ["q_proj", "fused"], "all-linear"):
        pool = needs(config(policy={"lora": {"rank": 3, "target_modules": targets}}), SMALL).pool("policy")
        assert pool is not None
        counted[str(targets)] = pool.bytes.optimizer
    # q 8 + 8, down 16 + 8: 3 x 40 = 120 in each of two layers.
    assert list(counted.values()) == [12 * 240, 12 * 768, 12 * 768]


def test_the_policy_with_adapters_is_its_own_reference() -> None:
    kl = {"kl": {"where": "loss", "coefficient": 0.1}}
    assert needs(config(algorithm=kl, policy={"lora": {"rank": 3}}), SMALL).pool("reference") is None


def test_no_reference_pool_without_kl() -> None:
    assert needs(config(), SMALL).pool("reference") is None
    with_kl = needs(config(algorithm={"kl": {"where": "loss", "coefficient": 0.1}}), SMALL)
    reference = with_kl.pool("reference")
    assert reference is not None
    assert (reference.bytes.weights, reference.bytes.optimizer) == (2544, 0)


# The same with 4 hidden and an untied head.
# One layer: q, o 2 x 4x8 + k, v 2 x 4x4 = 96; MLP 3 x 4x16 = 192; two norms 8: 296.
# Without output head: 2 x 296 + embedding 10x4 + last norm 4 = 636; with the value head of 4: 640.
OTHER = ModelShape(layers=2, hidden=4, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocab=10, tied=False)


def test_no_critic_pool_without_an_advantage_that_needs_one() -> None:
    assert needs(config(), SMALL).pool("critic") is None
    assert needs(config(algorithm={"advantage": "gae"}), SMALL).pool("critic") is not None


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        # 1272 parameters, tied, and a value head of 8: 1280 on 2 ranks. bfloat16 2560, float32 5120, optimizer 15360.
        (1, 2560, 5120 + 2560, 7680),
        (2, 2560, 2560, 7680),
        # All may be whole at a time.
        (3, 1280 + 2560, 2560, 7680),
    ],
)
def test_a_critic_is_sharded_like_a_policy_with_a_value_head(
    stage: int, weights: int, gradients: int, optimizer: int
) -> None:
    made = config(algorithm={"advantage": "gae"}, critic={"ranks": 2, "zero_stage": stage})
    pool = needs(made, SMALL).pool("critic")
    assert pool is not None
    assert (pool.units, pool.devices) == (2, 2)
    assert (pool.bytes.weights, pool.bytes.gradients, pool.bytes.optimizer) == (weights, gradients, optimizer)


def test_a_critic_has_no_logits_and_sends_no_weights() -> None:
    # 432 a layer and token, as for the policy; 16 tokens of its own cap, 2 layers.
    made = config(algorithm={"advantage": "gae"}, critic={"max_tokens_per_microbatch": 16})
    pool = needs(made, SMALL).pool("critic")
    assert pool is not None
    assert (pool.bytes.activations, pool.bytes.sync_buckets) == (16 * 2 * 432 + 4 * 1280, 0)


def test_a_critic_is_counted_with_the_shape_of_the_model_that_it_starts_from() -> None:
    model = {"path": "org/rm"}
    gae = {"advantage": "gae"}
    starts = {
        "policy": needs(config(algorithm=gae), SMALL, "cpu", None, OTHER),
        "reward": needs(
            config(algorithm=gae, critic={"model": "reward"}, reward={"model": model}), SMALL, "cpu", None, OTHER
        ),
        "own": needs(config(algorithm=gae, critic={"model": "org/lm"}), SMALL, "cpu", OTHER),
    }
    weights = {name: pool.bytes.weights for name, made in starts.items() if (pool := made.pool("critic"))}
    assert weights == {"policy": 2 * 1280, "reward": 2 * 640, "own": 2 * 640}


def test_a_reward_model_only_goes_forward_in_its_own_dtype() -> None:
    assert needs(config(), SMALL).pool("reward_model") is None
    made = config(reward={"model": {"path": "org/rm", "ranks": 2, "dtype": "float32"}})
    pool = needs(made, SMALL).pool("reward_model")
    assert pool is not None
    # One layer: 32 tokens x 4 bytes x (4 x 8 + 3 x 8 + 3 x 4 + 3 x 16 = 116).
    assert (pool.units, pool.bytes.weights, pool.bytes.activations) == (2, 4 * 1280, 32 * 4 * 116)
    assert (pool.bytes.optimizer, pool.bytes.gradients) == (0, 0)
    own = needs(made, SMALL, "cpu", None, OTHER).pool("reward_model")
    assert own is not None
    assert own.bytes.weights == 4 * 640


def test_sharded_forward_models_keep_a_share_and_the_part_that_is_gathered() -> None:
    # Reference: 2544 bytes over 2 ranks, reward model: 2560 bytes over 4, and each whole at a time.
    made = config(
        algorithm={"kl": {"where": "loss", "coefficient": 0.1}},
        reference={"ranks": 2, "sharded": True},
        reward={"model": {"path": "org/rm", "ranks": 4, "sharded": True}},
    )
    reference, reward_model = needs(made, SMALL).pool("reference"), needs(made, SMALL).pool("reward_model")
    assert reference is not None and reward_model is not None
    assert (reference.bytes.weights, reward_model.bytes.weights) == (1272 + 2544, 640 + 2560)


def test_no_worker_processes_without_reward_functions() -> None:
    made = config_from_dict(
        {
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"model": {"path": "org/rm"}},
        },
        check_files=False,
    )
    assert [pool.pool for pool in needs(made, SMALL).pools] == ["policy", "reward_model", "rollout"]


def test_classic_ppo_has_a_pool_with_devices_for_each_role() -> None:
    made = load_config(Path(__file__).resolve().parents[2] / "configs" / "ppo.yaml", check_files=False)
    needed = needs(made, SMALL, "cuda")
    assert {pool.pool: pool.devices for pool in needed.pools} == {
        "policy": 1,
        "critic": 1,
        "reference": 1,
        "reward_model": 1,
        "rollout": 1,
    }


def test_reward_workers_take_no_devices() -> None:
    needed = needs(config(policy={"ranks": 2}, rollout={"engines": 2}), SMALL)
    reward = needed.pool("reward")
    assert reward is not None
    assert (reward.units, reward.devices) == (3, 0)
    assert needed.devices == 4


# ZeRO 3 on 2 ranks of 1272 parameters: bfloat16 weights 1272 and 2544 that are whole at a time, gradients 2544 (twice
# where they are offloaded: 5088), optimizer 7632.
@pytest.mark.parametrize(
    ("offload", "weights", "gradients", "optimizer", "host"),
    [
        ("none", 1272 + 2544, 2544, 7632, 0),
        ("optimizer", 1272 + 2544, 0, 0, 5088 + 7632),
        ("optimizer_and_parameters", 2544, 0, 0, 5088 + 7632 + 1272),
    ],
)
def test_offload_moves_bytes_from_the_gpu_to_its_host(
    offload: str, weights: int, gradients: int, optimizer: int, host: int
) -> None:
    made = config(policy={"ranks": 2, "zero_stage": 3, "offload": offload})
    pool, plain = (needs(c, SMALL, "cuda").pool("policy") for c in (made, config(policy={"ranks": 2, "zero_stage": 3})))
    assert pool is not None and plain is not None
    assert (pool.bytes.weights, pool.bytes.gradients, pool.bytes.optimizer) == (weights, gradients, optimizer)
    assert pool.bytes.activations == plain.bytes.activations
    assert pool.host_bytes == host


def test_what_a_critic_gathers_stays_on_the_gpu() -> None:
    # 1280 bfloat16 parameters are 2560 bytes whole, and 1280 a share on 2 ranks.
    critic = {"ranks": 2, "zero_stage": 3, "offload": "optimizer_and_parameters"}
    needed = needs(config(algorithm={"advantage": "gae"}, critic=critic), SMALL, "cuda")
    pool = needed.pool("critic")
    assert pool is not None
    assert (pool.bytes.weights, pool.host_bytes) == (2560, 2 * 2560 + 7680 + 1280)
    assert needed.host_bytes == 2 * pool.host_bytes


def test_a_state_on_a_disk_leaves_gradients_and_one_sub_group_in_the_hosts_memory() -> None:
    # SmolLM2's 134,515,008 parameters on 2 ranks, 67,257,504 on each. A sub-group: 25 million and a half of the
    # embedding's 28,311,552.
    shape = ModelShape.from_config(SMOLLM2, "config.json")
    offloaded = {"ranks": 2, "zero_stage": 3, "offload": "optimizer", "offload_to": "disk"}
    gpu, cpu = (needs(config(policy=offloaded), shape, device).pool("policy") for device in ("cuda", "cpu"))
    assert gpu is not None and cpu is not None
    gradients, sub_group = 4 * 67_257_504, 16 * (25_000_000 + 14_155_776)
    assert (gpu.bytes.gradients, gpu.bytes.optimizer, gpu.host_bytes) == (0, 0, gradients + sub_group)
    assert (cpu.bytes.gradients, cpu.bytes.optimizer, cpu.host_bytes) == (gradients, sub_group, 0)
    # A state that is smaller than that is read whole.
    small = needs(config(policy=offloaded), SMALL, "cuda").pool("policy")
    assert small is not None and small.host_bytes == 4 * 636 + 16 * 636


def test_on_cpu_offload_moves_nothing_and_has_its_gradients_twice() -> None:
    offloaded = config(policy={"zero_stage": 3, "offload": "optimizer_and_parameters"})
    pool, plain = (needs(c, SMALL).pool("policy") for c in (offloaded, config(policy={"zero_stage": 3})))
    assert pool is not None and plain is not None
    assert pool.host_bytes == 0
    assert pool.bytes.total == plain.bytes.total + 4 * 1272


@pytest.mark.parametrize(("parallel", "fine"), [(1, True), (3, True), (9, True), (2, False), (4, False), (5, False)])
def test_tensor_parallel_must_divide_heads_and_kv_heads(parallel: int, fine: bool) -> None:
    # SmolLM2 has 9 heads and 3 KV heads; on 9 devices each KV head is there three times.
    shape = ModelShape.from_config(SMOLLM2, "config.json")
    big = config(rollout={"tensor_parallel": parallel, "kv_cache_bytes": GIB})
    problems = needs(big, shape).problems
    assert (problems == ()) is fine
    if not fine:
        assert f"rollout.tensor_parallel = {parallel}" in problems[0]
        assert "Use one of 1, 3, 9" in problems[0]


def test_ranks_that_share_rows_have_a_part_of_the_activations_each() -> None:
    # 33 tokens on two ranks: 17 of them. A layer and token takes 432 bytes, see above; logits 3 x 4 x 17 x 10 = 2040.
    shared = config(
        algorithm={"advantage": "gae"},
        policy={"ranks": 2, "sequence_parallel": 2, "max_tokens_per_microbatch": 33},
        critic={"ranks": 2, "sequence_parallel": 2, "max_tokens_per_microbatch": 33},
    )
    policy, critic = (needs(shared, SMALL).pool(name) for name in ("policy", "critic"))
    assert policy is not None and critic is not None
    # The buffer of the gradients is not shared: 5088 and 5120.
    assert policy.bytes.activations == 2 * 17 * 432 + 2040 + 320 + 5088
    assert critic.bytes.activations == 2 * 17 * 432 + 5120
    assert (policy.problems, critic.problems) == ((), ())


@pytest.mark.parametrize(("size", "fine"), [(1, True), (3, True), (2, False), (9, False)])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_ranks_that_share_rows_divide_heads_and_kv_heads(role: str, size: int, fine: bool) -> None:
    # SmolLM2 has 9 heads and 3 KV heads, of which 9 ranks would get a third each.
    shape = ModelShape.from_config(SMOLLM2, "config.json")
    shared = config(
        algorithm={"advantage": "gae"},
        rollout={"kv_cache_bytes": GIB, "prompts_per_step": 9},
        **{role: {"ranks": size, "sequence_parallel": size}},
    )
    problems = needs(shared, shape).problems
    assert (problems == ()) is fine
    if not fine:
        assert f"{role}.sequence_parallel = {size}: the model has 9 heads and 3 KV heads" in problems[0]
        assert f"{size} ranks would get {'4.5 and 1.5' if size == 2 else '1 and 0.3333'} of them" in problems[0]
        assert "Use one of 1, 3" in problems[0]
        with pytest.raises(Refused, match=f"{role}.sequence_parallel = {size}"):
            preflight(needs(shared, shape), Resources((Node(99, 0, 99 * GIB),)))


def test_a_critic_shares_rows_by_the_heads_of_its_own_model() -> None:
    # SMALL has 4 heads and 2 KV heads, the critic 3 and 3.
    other = ModelShape(layers=1, hidden=6, intermediate=8, heads=3, kv_heads=3, head_dim=2, vocab=10, tied=True)
    shared = config(
        algorithm={"advantage": "gae"},
        policy={"ranks": 2, "sequence_parallel": 2},
        critic={"ranks": 2, "sequence_parallel": 2, "model": "org/critic"},
    )
    (problem,) = needs(shared, SMALL, critic_shape=other).problems
    assert problem.startswith("critic.sequence_parallel = 2: the model has 3 heads and 3 KV heads")


def test_a_kv_cache_too_small_for_one_sequence_is_a_problem() -> None:
    (problem,) = needs(config(rollout={"kv_cache_bytes": 319}), SMALL).problems
    assert "32 x 10 = 320 bytes" in problem


def _needs(**sections: Any) -> Needs:
    return needs(config(**sections), SMALL)


def test_too_few_slots_are_refused_with_the_numbers_of_each_pool() -> None:
    with pytest.raises(Refused) as refused:
        preflight(_needs(policy={"ranks": 2}, rollout={"engines": 2}), Resources((Node(2, 0, GIB),)))
    message = str(refused.value)
    assert "needs 4 CPU slots, cluster has 2" in message
    assert "policy needs 2 x 1 = 2 CPU slots" in message
    assert "rollout needs 2 x 1 = 2 CPU slots" in message
    assert "Lower policy.ranks, rollout.engines, or give the cluster 2 more" in message


def test_a_cluster_of_our_own_gets_the_slots_it_needs() -> None:
    preflight(_needs(policy={"ranks": 8}), Resources((Node(2, 0, GIB),), elastic=True))


def test_an_engine_larger_than_any_node_is_refused() -> None:
    nodes = (Node(3, 0, GIB), Node(3, 0, GIB))
    with pytest.raises(Refused, match="one unit needs 4 CPU slots on one node, the largest node has 3"):
        preflight(_needs(rollout={"tensor_parallel": 4}), Resources(nodes))


def test_too_little_memory_is_refused_with_the_terms() -> None:
    with pytest.raises(Refused, match=r"policy needs 1 x .* \(weights 2\.5 KiB \+ gradients 5\.0 KiB \+ optimizer"):
        preflight(_needs(), Resources((Node(8, 0, 4096),)))


def test_too_small_a_gpu_is_refused_for_the_pool_that_does_not_fit() -> None:
    needed = needs(config(policy={"max_tokens_per_microbatch": 3200}), SMALL, "cuda")
    policy, rollout = needed.pool("policy"), needed.pool("rollout")
    assert policy is not None and rollout is not None and policy.bytes.total > rollout.bytes.total
    with pytest.raises(Refused) as refused:
        preflight(needed, Resources((Node(8, 8, GIB),), gpu_bytes=policy.bytes.total - 1))
    assert "policy needs" in str(refused.value)
    assert "rollout needs" not in str(refused.value)


def test_a_host_too_small_for_what_is_offloaded_is_refused_with_the_terms() -> None:
    # 2 ranks x (gradients 5088 + optimizer 7632) = 25440 bytes.
    policy = {"ranks": 2, "zero_stage": 3, "offload": "optimizer"}
    needed = needs(config(policy=policy), SMALL, "cuda")
    preflight(needed, Resources((Node(8, 8, 25440),), gpu_bytes=GIB))
    with pytest.raises(Refused, match=r"24\.8 KiB of host memory for what is offloaded \(policy 2 x 12\.4 KiB\)"):
        preflight(needed, Resources((Node(8, 8, 25439),), gpu_bytes=GIB))


def test_an_engine_may_use_only_its_share_of_a_gpu() -> None:
    needed = needs(config(), SMALL, "cuda")
    rollout = needed.pool("rollout")
    assert rollout is not None
    fits = Resources((Node(8, 8, GIB),), gpu_bytes=rollout.bytes.total * 2)
    preflight(needed, fits, gpu_memory_utilization=0.5)
    with pytest.raises(Refused, match=r"rollout needs .* a GPU has .* \(0\.4 of "):
        preflight(needed, fits, gpu_memory_utilization=0.4)


def test_auto_takes_gpus_where_there_are_any() -> None:
    assert resolve_device("auto", Resources((Node(8, 1, GIB),))) == "cuda"
    assert resolve_device("auto", Resources((Node(8, 0, GIB),))) == "cpu"
    assert resolve_device("cpu", Resources((Node(8, 1, GIB),))) == "cpu"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(Refused, match=r"placement\.device = cuda: the cluster has no GPU"):
        resolve_device("cuda", Resources((Node(8, 0, GIB),)))


def test_the_table_has_a_row_a_pool_and_the_total() -> None:
    lines = render_table(_needs(policy={"ranks": 2}), "2 CPUs").splitlines()
    assert [line.split()[0] for line in lines] == ["pool", lines[1], "policy", "rollout", "reward", "all", "available:"]
    assert lines[5].split()[1] == "3"
    assert len({len(line) for line in lines[2:6]}) == 1


@pytest.mark.parametrize(("count", "text"), [(0, "-"), (12, "12 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB")])
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_needs_import_neither_ray_nor_torch() -> None:
    code = (
        "import sys, rlhf.cluster.needs, rlhf.cluster.preflight, rlhf.cluster.process\n"
        "sys.exit(bool({'ray', 'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_checkpoints_on_a_cpu_take_a_copy_of_weights_and_optimizer() -> None:
    saved = config(checkpoint={"every": 5})
    policy, without = needs(saved, SMALL).pool("policy"), needs(config(), SMALL).pool("policy")
    assert policy is not None and without is not None
    # bfloat16 weights 2 x 1272, masters and two moments 12 x 1272.
    assert policy.bytes.checkpoint == 14 * 1272
    assert policy.bytes.total - policy.bytes.checkpoint == without.bytes.total
    on_gpu = needs(saved, SMALL, "cuda").pool("policy")
    assert on_gpu is not None and on_gpu.bytes.checkpoint == 0
