"""Rules about checkpoints and where a run begins, each with a case that it refuses and one that it doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config import config_from_dict, dump_config
from rlhf.config.rules_checkpoint import JUDGES, checkpoint_files, resolve_checkpoint_paths
from rlhf.config.yaml_source import parse_value
from rlhf.tracking.metrics import lookup
from tests.unit.configs import build, refusals

EVALUATION = {"evaluation.prompts": {"source": "reasoning_gym", "task": "chain_sum", "seed": 9}}


def test_a_run_writes_no_checkpoints_unless_it_is_told_how_often() -> None:
    config = build({})
    assert (config.checkpoint.every, config.checkpoint.resume, config.run.if_exists) == (0, "auto", "refuse")


@pytest.mark.parametrize(
    ("key", "value"), [("keep", 5), ("keep_best", {"metric": "reward/mean"}), ("on_failed_save", "continue")]
)
def test_settings_of_checkpoints_are_refused_where_none_are_written(key: str, value: object) -> None:
    name = f"checkpoint.{key}"
    assert "has no effect while checkpoint.every is 0" in refusals({name: value})[name]
    build({name: value, "checkpoint.every": 5})


def test_resuming_needs_checkpoints() -> None:
    # Such a run would begin at step 1 at each start, and the user would take it for a resumed one.
    found = refusals({"run.if_exists": "resume"})
    assert "nothing to resume from while checkpoint.every is 0" in found["run.if_exists"]
    assert "run.if_exists: replace" in found["run.if_exists"]
    build({"run.if_exists": "resume", "checkpoint.every": 5})


def test_never_contradicts_resuming() -> None:
    found = refusals({"run.if_exists": "resume", "checkpoint.every": 5, "checkpoint.resume": "never"})
    assert "contradicts run.if_exists: resume" in found["checkpoint.resume"]
    build({"run.if_exists": "replace", "checkpoint.every": 5, "checkpoint.resume": "never"})


@pytest.mark.parametrize("if_exists", ["refuse", "replace"])
def test_must_needs_a_folder_that_is_resumed(if_exists: str) -> None:
    changes = {"run.if_exists": if_exists, "checkpoint.resume": "must", "checkpoint.every": 5}
    assert f"run.if_exists: {if_exists}" in refusals(changes)["checkpoint.resume"]
    build({**changes, "run.if_exists": "resume"})


@pytest.mark.parametrize("if_exists", ["refuse", "replace", "resume"])
def test_a_new_run_may_begin_at_the_checkpoint_of_another(if_exists: str) -> None:
    path = "runs/other/checkpoints/step-000010"
    config = build({"run.if_exists": if_exists, "checkpoint.resume": path, "checkpoint.every": 5})
    assert isinstance(config.checkpoint.resume, Path)


def test_a_misspelt_word_is_not_taken_for_a_path() -> None:
    assert "Did you mean auto?" in refusals({"checkpoint.resume": "atuo"})["checkpoint.resume"]
    assert isinstance(build({"checkpoint.resume": "./copies/auto"}).checkpoint.resume, Path)


@pytest.mark.parametrize("resume", ["must", "other/checkpoints/step-000010"])
def test_weights_alone_and_a_whole_checkpoint_are_two_beginnings(resume: str) -> None:
    changes = {
        "checkpoint.init_from": "sft/checkpoints/step-000100",
        "checkpoint.resume": resume,
        "checkpoint.every": 5,
        "run.if_exists": "resume",
    }
    assert f"has no effect with checkpoint.resume: {resume}" in refusals(changes)["checkpoint.init_from"]
    build({**changes, "checkpoint.resume": "auto"})


@pytest.mark.parametrize("metric", [judge for judge in JUDGES if "eval" not in judge])
def test_the_best_is_judged_by_a_metric_of_the_steps(metric: str) -> None:
    name = metric.replace("<function>", "exact_match")
    build({"checkpoint.every": 5, "checkpoint.keep_best": {"metric": name}})


@pytest.mark.parametrize("judge", JUDGES)
def test_every_judge_is_in_the_catalogue_of_metrics(judge: str) -> None:
    found = lookup(judge)
    assert found is not None and found.name == judge


@pytest.mark.parametrize("metric", ["reward/men", "time/step", "ledger/drawn", "accuracy", "reward//mean "])
def test_what_judges_no_policy_is_refused(metric: str) -> None:
    changes = {"checkpoint.every": 5, "checkpoint.keep_best": {"metric": metric}}
    assert "is no metric that a checkpoint can be judged by" in refusals(changes)["checkpoint.keep_best.metric"]


def test_a_metric_of_the_evaluation_needs_one_at_every_checkpoint() -> None:
    key = "checkpoint.keep_best.metric"
    changes: dict[str, Any] = {"checkpoint.every": 6, "checkpoint.keep_best": {"metric": "eval/accuracy"}}
    assert "there is no evaluation in this run" in refusals(changes)[key]
    for every in (0, 4):
        found = refusals({**changes, **EVALUATION, "evaluation.every": every})[key]
        assert f"a checkpoint every 6 steps is not judged by an evaluation every {every}" in found
        assert "Set evaluation.every to 6, or to a divisor of it" in found
    build({**changes, **EVALUATION, "evaluation.every": 3})


def test_paths_become_absolute_and_words_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both = build({"checkpoint.resume": "never", "checkpoint.init_from": "sft/step-000100"}).checkpoint
    resolved = resolve_checkpoint_paths(both)
    assert (resolved.resume, resolved.init_from) == ("never", tmp_path / "sft" / "step-000100")
    one = build({"checkpoint.resume": "a/../b/step-000001"}).checkpoint
    assert resolve_checkpoint_paths(one).resume == tmp_path / "b" / "step-000001"


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_path_leads_to_a_checkpoint(tmp_path: Path, key: str) -> None:
    def problems(path: Path) -> list[str]:
        return [f"{p.key}: {p.rule}. {p.hint}" for p in checkpoint_files(build({f"checkpoint.{key}": str(path)}))]

    (missing,) = problems(tmp_path / "nowhere")
    assert missing.startswith(f"checkpoint.{key}: {tmp_path / 'nowhere'} is no folder: it is not a checkpoint")
    (model,) = problems(tmp_path)
    assert f"{tmp_path} has no manifest.json" in model
    assert ("model.path" in model) == (key == "init_from")
    (tmp_path / "manifest.json").write_text("{}")
    assert problems(tmp_path) == []


def test_the_written_configuration_is_the_same_again(tmp_path: Path) -> None:
    config = build(
        {
            "checkpoint.every": 5,
            "checkpoint.keep_best": {"metric": "policy/kl", "mode": "min"},
            "checkpoint.resume": str(tmp_path / "step-000010"),
        }
    )
    assert config_from_dict(parse_value(dump_config(config)), check_files=False) == config
