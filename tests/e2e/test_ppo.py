"""The classic four-model PPO of `configs/ppo.yaml`, on tiny models, with two ranks each for policy and critic.

Those of the policy share each row, those of the critic share the batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rlhf.tracking.metrics import lookup
from tests.e2e.command import ROOT, Command, Outcome
from tests.tiny import make_tiny_reward_model

STEPS, WARMUP, PROMPTS, SAMPLES = 2, 2, 3, 2


@pytest.fixture(scope="module")
def run(tiny_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ppo")
    reward_model = make_tiny_reward_model(folder / "reward-model")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a}+{a + 1}="}) + "\n" for a in range(1, 9)))
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "ppo.yaml").read_text())
    config["run"] |= {"dir": str(folder / "runs"), "steps": STEPS}
    config["model"] = {"path": str(tiny_untied), "dtype": "float32"}
    config["data"] |= {"prompts": {"source": "jsonl", "path": str(prompts)}, "chat_template": False}
    config["data"]["max_prompt_tokens"] = 16
    config["rollout"] |= {
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": 12,
        "min_new_tokens": 2,
        "kv_cache_bytes": 1 << 26,
        "sampling": {"temperature": 0.9, "top_k": 30, "top_p": 0.95},
    }
    config["algorithm"]["kl"] |= {"controller": "adaptive", "target": 0.01, "horizon": 100}
    config["policy"] |= {"ranks": 2, "sequence_parallel": 2, "minibatches": 2}
    config["policy"] |= {"learning_rate": 1e-3, "warmup_steps": 0}
    config["critic"] |= {"ranks": 2, "minibatches": 2, "zero_stage": 3, "warmup_batches": WARMUP}
    config["reference"] = {"ranks": 1}
    config["reward"]["model"] |= {"path": str(reward_model), "dtype": "float32"}
    config["placement"] = {"device": "cpu"}
    return Command(config, folder).wait()


def test_it_ends_with_code_0_and_leaves_no_process(run: Outcome) -> None:
    assert run.code == 0, run.out + run.err
    assert run.left_running() == []


def test_every_role_has_a_pool_of_its_own(run: Outcome) -> None:
    logs = {path.stem for path in (run.folder / "logs").glob("*.log")}
    assert {"policy-0", "policy-1", "critic-0", "critic-1", "reference-0", "reward_model-0", "rollout-0"} <= logs
    # No reward functions, so no processes for them.
    assert "reward-0" not in logs


def test_each_step_has_the_figures_of_every_role_and_all_are_in_the_catalogue(run: Outcome) -> None:
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert not {name for line in lines for name in line if name != "step" and lookup(name) is None}
    expected = {
        "critic/loss", "critic/value_mean", "critic/return_mean", "critic/clip_fraction", "critic/grad_norm",
        "critic/explained_variance", "reward/reward_model/mean", "reward/shaped_mean", "policy/kl",
        "policy/kl_coefficient", "advantage/mean", "advantage/std", "advantage/kl_penalty_mean",
        "correction/weight_mean", "correction/effective_sample_size", "parity/kl", "busy/critic", "busy/reward_model",
        "busy/reference",
    }  # fmt: skip
    for line in lines:
        assert expected <= line.keys()
        assert line["policy/grad_norm"] > 0 and line["critic/grad_norm"] > 0


def test_engine_and_trainer_agree_under_top_k_top_p_and_a_minimum_length(run: Outcome) -> None:
    for line in run.metrics():
        assert line["parity/max_abs"] <= 1e-4  # float32
        assert line["correction/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    for step in (1, 2):
        rows = pq.read_table(run.folder / "trajectories" / f"step-{step:06d}.parquet").to_pylist()
        assert all(sum(row["loss_mask"]) >= 2 for row in rows)


def test_the_batches_of_the_critics_warm_up_are_discarded_and_counted(run: Outcome) -> None:
    batch = PROMPTS * SAMPLES
    for line in run.metrics():
        assert line["ledger/discarded"] == WARMUP * batch
        assert line["ledger/trained"] == line["step"] * batch
        assert line["ledger/drawn"] == (WARMUP + line["step"]) * batch
    notes = [line for line in run.out.splitlines() if "critic warm-up" in line]
    assert [note.split("critic warm-up ")[1].split(":")[0] for note in notes] == ["1/2", "2/2"]


def test_only_the_critic_learns_in_its_warm_up(run: Outcome) -> None:
    # The samples of step 1 are of version 0, and the policy that they start from still is the reference.
    rows = pq.read_table(run.folder / "trajectories" / "step-000001.parquet").to_pylist()
    assert {row["weight_version"] for row in rows} == {0}
    first, second = (line["advantage/kl_penalty_mean"] for line in run.metrics())
    assert first == pytest.approx(0.0, abs=1e-6)
    assert abs(second) > 1e-6


def test_advantages_are_whitened_over_the_batch(run: Outcome) -> None:
    for line in run.metrics():
        assert line["advantage/mean"] == pytest.approx(0.0, abs=1e-9)
        assert line["advantage/std"] == pytest.approx(1.0, abs=1e-9)


def test_the_coefficient_of_kl_follows_its_target(run: Outcome) -> None:
    # Six samples a step, horizon 100. Step 1: KL 0 against target 0.01 is an error of -1, clipped to -0.2, so the
    # coefficient becomes 0.05 x (1 - 0.2 x 6 / 100).
    first, second = (line["policy/kl_coefficient"] for line in run.metrics())
    assert first == 0.05
    assert second == pytest.approx(0.05 * (1 - 0.2 * 6 / 100))
