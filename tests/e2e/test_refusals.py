"""What can't work is refused by the command with code 2, before an actor starts, and without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import Command, tiny_config

CASES = {
    "a mistyped key": (["policy.learnig_rate=1"], "policy.learning_rate"),
    "a group of one": (["rollout.samples_per_prompt=1"], "samples_per_prompt"),
    "temperature 0": (["rollout.sampling.temperature=0"], "temperature"),
    "top-p without top-k": (["rollout.sampling.top_p=0.9"], "top_k"),
    "an estimator without its critic's reward model": (
        ["algorithm.advantage=gae", "critic.model=reward"],
        "reward.model",
    ),
    "an unknown loss": (["algorithm.loss=gpso"], "gspo"),
    "resume": (["run.if_exists=resume"], "replace"),
    "a missing model": (["model.path=./nowhere"], "model.path"),
    "heads that do not divide": (["rollout.tensor_parallel=3"], "tensor_parallel"),
    "an unknown reward": (["reward.functions.0.name=exact_mach"], "exact_match"),
    "an option the reward does not have": (["reward.functions.0={name: length, options: {tarjet: 1}}"], "target"),
    "more memory than there is": (["rollout.kv_cache_bytes=99000000000000"], "needs"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_the_place_and_the_remedy(name, tiny_untied: Path, tmp_path: Path) -> None:
    overrides, expected = CASES[name]
    outcome = Command(tiny_config(tiny_untied, tmp_path / "runs", "refused"), tmp_path, *overrides).wait(60)
    assert outcome.code == 2, outcome.out + outcome.err
    assert expected in outcome.err
    assert "Traceback" not in outcome.err
    assert not outcome.folder.exists()


def test_an_existing_run_is_refused_and_stays_as_it_was(tiny_untied: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_untied, tmp_path / "runs", "taken")
    kept = tmp_path / "runs" / "taken" / "metrics.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}\n")
    outcome = Command(config, tmp_path).wait(60)
    assert outcome.code == 2
    assert "run.if_exists=replace" in outcome.err
    assert kept.read_text() == "{}\n"


def test_a_dry_run_shows_configuration_and_placement_and_starts_nothing(tiny_untied: Path, tmp_path: Path) -> None:
    outcome = Command(tiny_config(tiny_untied, tmp_path / "runs", "dry"), tmp_path, "--dry-run").wait(60)
    assert outcome.code == 0
    assert "learning_rate" in outcome.out
    assert "rollout" in outcome.out and "policy" in outcome.out
    assert not outcome.folder.exists()
