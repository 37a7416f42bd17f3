"""The files that a configuration points to: they exist, the models fit, and paths are absolute."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rlhf.config.files import is_model_folder
from tests.unit.configs import build, refusals


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


@pytest.mark.parametrize("content", ["[]", '{"text_config": null}', "{"])
def test_a_model_folder_with_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refusals({"model.path": str(tmp_path)}, check_files=True)["model.path"]


def test_a_name_that_the_file_system_refuses_is_an_error_of_its_key(tmp_path: Path) -> None:
    found = refusals({"run.dir": str(tmp_path / ("x" * 300) / "runs")}, check_files=True)
    assert "too long" in found["run.dir"]


# --- reward model and critic

GAE = {"algorithm.advantage": "gae"}


def tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))


def test_a_missing_reward_model_or_critic_is_refused_by_its_key(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    changes = {**GAE, "model.path": "org/name"}
    found = refusals({**changes, "reward.model": {"path": missing}, "critic.model": missing}, check_files=True)
    assert f"no such folder: {missing}" in found["reward.model.path"]
    assert f"no such folder: {missing}" in found["critic.model"]
    assert "organisation/name" in found["critic.model"]
    assert build({**changes, "reward.model": {"path": "org/rm"}, "critic.model": "org/rm"}, check_files=True)


def test_a_mistyped_source_of_the_critic_is_refused_with_the_nearest(tmp_path: Path) -> None:
    changes = {**GAE, "model.path": "org/name"}
    assert "Did you mean policy?" in refusals({**changes, "critic.model": "polcy"}, check_files=True)["critic.model"]
    assert build({**changes, "critic.model": "policy"}, check_files=True).critic.model == "policy"


def test_a_critic_whose_context_is_too_short_is_refused(tmp_path: Path) -> None:
    critic = model_folder(tmp_path / "critic", max_position_embeddings=512)
    changes = {**GAE, "model.path": "org/name", "critic.model": str(critic), "data.max_prompt_tokens": 500}
    found = refusals(changes, check_files=True)
    assert "524 tokens, and the model of critic.model was made for at most 512" in found["rollout.max_new_tokens"]
    assert build({**changes, "rollout.max_new_tokens": 12}, check_files=True)


def test_a_critic_with_other_token_ids_than_the_policy_is_refused(tmp_path: Path) -> None:
    policy, critic = model_folder(tmp_path / "policy"), model_folder(tmp_path / "critic")
    changes = {**GAE, "model.path": str(policy), "critic.model": str(critic)}
    assert build(changes, check_files=True)  # without tokenizer files there is nothing to compare
    tokenizer(policy, {"a": 0, "b": 1, "c": 2})
    # 2 of the 3 tokens have changed places.
    tokenizer(critic, {"b": 0, "a": 1, "c": 2})
    assert "for 2 tokens: 'a' is 0 there and 1 here" in refusals(changes, check_files=True)["critic.model"]
    tokenizer(critic, {"a": 0, "b": 1, "c": 2})
    assert build(changes, check_files=True)


def save_head(folder: Path, name: str, outputs: int) -> None:
    """A safetensors file with one tensor of no content, and a configuration of a classifier."""
    content = {"architectures": ["TinyForSequenceClassification"], "id2label": {str(i): "" for i in range(outputs)}}
    (folder / "config.json").write_text(json.dumps(content))
    header = json.dumps({name: {"dtype": "F32", "shape": [outputs, 8], "data_offsets": [0, 32 * outputs]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("key", ["reward.model.path", "critic.model"])
def test_a_model_whose_value_head_would_be_random_is_refused(tmp_path: Path, key: str) -> None:
    folder = model_folder(tmp_path / "rm")
    changes = {**GAE, "model.path": "org/name", key: str(folder)}
    save_head(folder, "value.weight", 1)
    assert "no tensor score.weight" in refusals(changes, check_files=True)[key]
    save_head(folder, "score.weight", 2)
    assert "num_labels is 2" in refusals(changes, check_files=True)[key]
    save_head(folder, "score.weight", 1)
    assert build(changes, check_files=True)


def test_a_critic_may_start_from_a_language_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "lm")
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    changes = {**GAE, "model.path": "org/name"}
    assert build({**changes, "critic.model": str(folder)}, check_files=True)
    assert (
        "score head would be random"
        in refusals({**changes, "reward.model.path": str(folder)}, check_files=True)["reward.model.path"]
    )


def test_missing_files_of_advantages_and_losses_are_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    changes = {"model.path": "org/name"}
    names = {"algorithm.advantage": f"{tmp_path}/mien.py:estimate", "algorithm.loss": f"{tmp_path}/mien.py:loss"}
    found = refusals({**changes, **names}, check_files=True)
    for key in names:
        assert f"no such file: {tmp_path / 'mien.py'}" in found[key]
        assert f"Did you mean {tmp_path / 'mine.py'}?" in found[key]
    assert build({**changes, **{key: name.replace("mien", "mine") for key, name in names.items()}}, check_files=True)


def test_paths_of_models_and_functions_are_absolute_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build(
        {
            "algorithm": {"advantage": "mine.py:estimate", "loss": "my.module:loss"},
            "critic.model": "policy",
            "reward.model": {"path": "models/rm"},
        }
    )
    assert config.algorithm.advantage == f"{tmp_path / 'mine.py'}:estimate"
    assert config.algorithm.loss == "my.module:loss"
    assert config.critic.model == "policy"
    assert config.reward.model is not None
    assert config.reward.model.path == str(tmp_path / "models" / "rm")
    critics = {"models/critic": str(tmp_path / "models" / "critic"), "org/critic": "org/critic"}
    for name, resolved in critics.items():
        assert build({**GAE, "critic.model": name}).critic.model == resolved
