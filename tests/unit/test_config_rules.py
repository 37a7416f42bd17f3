"""Rules between keys, the files a configuration points to, and the reference model that is or isn't needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.algorithms.catalogue import ADVANTAGES, needs_reference
from rlhf.config import Config, ConfigError, config_from_dict
from rlhf.config.catalogue import BUILT_IN_REWARDS
from rlhf.config.files import is_model_folder
from rlhf.config.keys import choices
from rlhf.config.schema import AlgorithmConfig
from rlhf.rewards.builtin import BUILT_IN


def build(changes: dict[str, Any], *, check_files: bool = False) -> Config:
    data: dict[str, Any] = {
        "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
        "reward": {"functions": [{"name": "reasoning_gym"}]},
    }
    for path, value in changes.items():
        *above, last = path.split(".")
        here = data
        for part in above:
            here = here.setdefault(part, {})
        here[last] = value
    return config_from_dict(data, check_files=check_files)


def refusals(changes: dict[str, Any], *, check_files: bool = False) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(changes, check_files=check_files)
    return {problem.key: f"{problem.rule}. {problem.hint}" for problem in caught.value.problems}


def test_the_catalogue_has_every_estimator_and_reward_that_can_be_configured() -> None:
    assert set(choices(AlgorithmConfig.model_fields["advantage"].annotation)) == set(ADVANTAGES)
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS


def test_a_group_estimator_with_one_sample_is_refused_naming_estimator_and_n() -> None:
    found = refusals({"rollout.samples_per_prompt": 1})
    assert "algorithm.advantage grpo" in found["rollout.samples_per_prompt"]
    assert "n = 1" in found["rollout.samples_per_prompt"]
    assert build({"rollout.samples_per_prompt": 2}).rollout.samples_per_prompt == 2


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", 0, "greedy samples can't be trained on"),
        ("top_p", 0.9, "truncates the distribution"),
        ("top_k", 50, "truncates the distribution"),
        ("top_k", 0, "Use -1"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused_with_the_reason(key: str, value: float, reason: str) -> None:
    assert reason in refusals({f"rollout.sampling.{key}": value})[f"rollout.sampling.{key}"]


def test_a_kl_coefficient_with_nowhere_to_go_is_refused() -> None:
    found = refusals({"algorithm.kl": {"where": "none", "coefficient": 0.1, "estimator": "k1"}})
    assert "has no effect while algorithm.kl.where is none" in found["algorithm.kl.coefficient"]
    assert "has no effect" in found["algorithm.kl.estimator"]


def test_kl_in_the_loss_with_coefficient_zero_is_refused() -> None:
    found = refusals({"algorithm.kl": {"where": "loss", "coefficient": 0}})
    assert "no effect but the cost of a reference model" in found["algorithm.kl.coefficient"]


def test_kl_has_one_place_so_it_cannot_be_applied_twice() -> None:
    found = refusals({"algorithm.kl": {"where": ["loss", "reward"], "coefficient": 0.1}})
    assert "must be one of: none, loss" in found["algorithm.kl.where"]


def test_stating_that_there_is_no_kl_is_fine() -> None:
    config = build({"algorithm.kl": {"where": "none", "estimator": "k3", "coefficient": 0.0}})
    assert not needs_reference(config)


def test_a_reference_is_needed_for_kl_only() -> None:
    assert not needs_reference(build({}))
    assert needs_reference(build({"algorithm.kl": {"where": "loss", "coefficient": 0.01}, "reference": {"ranks": 2}}))
    assert build({"reference": {"ranks": 1}}).reference.ranks == 1  # the default, restated
    assert "none is started" in refusals({"reference": {"ranks": 2}})["reference"]


def test_deterministic_runs_need_float32_and_a_cpu() -> None:
    found = refusals({"run.deterministic": True, "placement.device": "cuda", "rollout.engines": 2})
    assert "one engine" in found["rollout.engines"]
    assert "float32" in found["model.dtype"]
    assert "CPU" in found["placement.device"]
    assert build({"run.deterministic": True, "model.dtype": "float32"}).run.deterministic


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


# --- files


def model_folder(folder: Path, **shape: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_heads_that_do_not_divide_are_refused_with_the_numbers(tmp_path: Path) -> None:
    # SmolLM2-135M: 9 heads over 2 devices leave a remainder; over 3 each device has 3 heads and 1 KV head.
    model = str(model_folder(tmp_path / "m", num_attention_heads=9, num_key_value_heads=3))
    found = refusals({"model.path": model, "rollout.tensor_parallel": 2}, check_files=True)
    assert "9 attention heads and 3 KV heads" in found["rollout.tensor_parallel"]
    assert "Possible: 1, 3, 9" in found["rollout.tensor_parallel"]
    assert build({"model.path": model, "rollout.tensor_parallel": 3}, check_files=True)


def test_prompts_and_responses_that_exceed_the_context_are_refused(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "m", max_position_embeddings=512))
    changes = {"model.path": model, "data.max_prompt_tokens": 500}
    assert (
        "500 + rollout.max_new_tokens 24 = 524 tokens" in refusals(changes, check_files=True)["rollout.max_new_tokens"]
    )
    assert build({**changes, "rollout.max_new_tokens": 12}, check_files=True)


def test_a_missing_model_folder_is_refused_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "scripts/quickstart.sh" in refusals({}, check_files=True)["model.path"]
    found = refusals({"model.path": str(tmp_path / "nothing")}, check_files=True)
    assert f"no such folder: {tmp_path / 'nothing'}" in found["model.path"]
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusals({"model.path": "./empty"}, check_files=True)["model.path"]
    assert build({"model.path": "Qwen/Qwen2.5-1.5B-Instruct"}, check_files=True).model.path.startswith("Qwen/")


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("Qwen/Qwen2.5-0.5B", False),
        ("models/tiny", True),
        ("./a/b", True),
        ("/a", True),
        ("~/a", True),
        ("a/b/c", True),
        ("gpt2", True),
        ("here/x", True),
    ],
)
def test_hub_names_and_folders_are_told_apart(
    path: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_model_folder(path) is folder


def test_missing_data_and_reward_files_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    changes = {
        "model.path": "org/name",
        "data.prompts": {"source": "jsonl", "path": str(tmp_path / "trian.jsonl")},
        "reward.functions": [{"name": f"{tmp_path}/mine.py:score"}],
    }
    found = refusals(changes, check_files=True)
    assert f"Did you mean {tmp_path / 'train.jsonl'}?" in found["data.prompts.path"]
    assert "no such file" in found["reward.functions.0.name"]


def test_paths_are_absolute_before_any_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "models" / "tiny")
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "mine.py").touch()
    config = build(
        {
            "run.dir": "./out",
            "model.path": "models/tiny",
            "data.prompts": {"source": "jsonl", "path": "train.jsonl"},
            "evaluation": {"prompts": {"source": "jsonl", "path": "train.jsonl"}},
            "reward.functions": [{"name": "mine.py:score"}],
        },
        check_files=True,
    )
    assert config.run.dir == tmp_path / "out"
    assert config.model.path == str(tmp_path / "models" / "tiny")
    assert config.data.prompts.path == tmp_path / "train.jsonl"  # type: ignore[union-attr]
    assert config.evaluation is not None
    assert config.evaluation.prompts.path == tmp_path / "train.jsonl"  # type: ignore[union-attr]
    assert config.reward.functions[0].name == f"{tmp_path / 'mine.py'}:score"


def test_a_run_folder_inside_an_uploaded_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    upload.mkdir(parents=True)
    monkeypatch.chdir(upload)
    found = refusals({"model.path": "org/name"}, check_files=True)
    assert "Ray deletes that folder when the job ends" in found["run.dir"]
    assert build({"model.path": "org/name", "run.dir": str(tmp_path / "runs")}, check_files=True)


def test_clipping_is_refused_where_the_ratio_is_always_1() -> None:
    found = refusals({"algorithm.clip": {"high": 0.28}})
    assert "ratio is 1" in found["algorithm.clip.high"].replace("\n", " ")
    assert build({"algorithm.clip": {"low": 0.2, "high": 0.2}}).algorithm.clip.high == 0.2  # the defaults, restated
    assert build({"algorithm.clip": {"high": 0.28}, "policy.minibatches": 2}).algorithm.clip.high == 0.28


def test_k1_is_refused_in_the_loss() -> None:
    kl = {"where": "loss", "coefficient": 0.1}
    assert "k2 or k3" in refusals({"algorithm.kl": kl | {"estimator": "k1"}})["algorithm.kl.estimator"]
    assert build({"algorithm.kl": kl | {"estimator": "k2"}}).algorithm.kl.estimator == "k2"


@pytest.mark.parametrize("content", ["[]", '{"text_config": null}', "{"])
def test_a_model_folder_with_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refusals({"model.path": str(tmp_path)}, check_files=True)["model.path"]


def test_a_name_that_the_file_system_refuses_is_an_error_of_its_key(tmp_path: Path) -> None:
    found = refusals({"run.dir": str(tmp_path / ("x" * 300) / "runs")}, check_files=True)
    assert "too long" in found["run.dir"]
