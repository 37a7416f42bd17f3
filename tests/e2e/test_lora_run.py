"""GRPO with adapters and KL on two ranks at ZeRO 3: the policy is its own reference, and engines get merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.command import Command, Outcome, tiny_config

STEPS = 3


@pytest.fixture(scope="module")
def run(tiny_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("lora")
    config = tiny_config(tiny_tied, folder / "runs", "lora")
    config["run"]["steps"] = STEPS
    config["algorithm"] = {"kl": {"where": "loss", "coefficient": 0.1}}
    config["policy"] |= {"ranks": 2, "zero_stage": 3, "learning_rate": 1e-2}
    config["checkpoint"] = {"every": STEPS}
    return Command(config, folder, "policy.lora.rank=4").wait()


def test_it_ends_with_code_0_and_leaves_no_process(run: Outcome) -> None:
    assert run.code == 0, run.out + run.err
    assert run.left_running() == []


def test_there_is_no_reference_besides_the_policy(run: Outcome) -> None:
    logs = {path.stem for path in (run.folder / "logs").glob("*.log")}
    assert {"policy-0", "policy-1", "rollout-0"} <= logs
    assert not {name for name in logs if name.startswith("reference")}


def test_kl_from_the_base_model_is_0_before_the_first_update_and_grows(run: Outcome) -> None:
    first, *later = (line["policy/kl"] for line in run.metrics())
    assert first == pytest.approx(0.0, abs=1e-9)
    assert len(later) == STEPS - 1
    assert all(kl > 1e-6 for kl in later)


def test_engines_sample_from_the_policy_with_its_adapters(run: Outcome) -> None:
    # float32; weights have moved before each step but the first.
    for line in run.metrics():
        assert line["parity/max_abs"] <= 1e-4
        assert line["policy/grad_norm"] > 0


def test_the_export_is_an_ordinary_checkpoint_of_which_the_adapted_layers_have_moved(
    run: Outcome, tiny_tied: Path
) -> None:
    from transformers import AutoModelForCausalLM

    base, exported = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for folder in (tiny_tied, run.folder / "export")
    )
    assert exported.keys() == base.keys()
    moved = {name for name in base if not torch.equal(base[name], exported[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}


def test_the_checkpoint_is_smaller_than_the_model(run: Outcome, tiny_tied: Path) -> None:
    saved = run.folder / "checkpoints" / f"step-{STEPS:06d}" / "policy" / "shards"
    size = sum(path.stat().st_size for path in saved.iterdir())
    # 16,384 numbers in adapters, with masters and two moments of 4 bytes each; the model has 0.3 million of 4 bytes.
    assert size < (tiny_tied / "model.safetensors").stat().st_size
