"""Whole runs of the command: what they leave, and that every figure in it is consistent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.tracking.metrics import lookup
from tests.e2e.command import Command, Outcome, tiny_config
from tests.integration.engines import Engine, Trainer

STEPS = 2


@pytest.fixture(scope="module")
def plain(tiny_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The smallest run: one rank, one engine, no reference; several optimizer steps a batch."""
    folder = tmp_path_factory.mktemp("plain")
    config = tiny_config(tiny_untied, folder / "runs", "plain")
    return Command(config, folder, "policy.epochs=2", "policy.minibatches=3").wait()


@pytest.fixture(scope="module")
def wide(tiny_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two policy ranks at ZeRO 3, two engines, tied embeddings, a sharded reference, an evaluation, all trackers."""
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_config(tiny_tied, folder / "runs", "wide")
    config["evaluation"] = {"prompts": config["data"]["prompts"] | {"size": 3, "seed": 7}}
    overrides = [
        "policy.ranks=2",
        "policy.zero_stage=3",
        "rollout.engines=2",
        "reference={ranks: 2, sharded: true}",
        "algorithm.kl={where: loss, estimator: k3, coefficient: 0.01}",
        "model.dtype=bfloat16",
        "tracking.wandb.mode=online",
        "tracking.tensorboard=true",
    ]
    return Command(config, folder, *overrides).wait()


@pytest.fixture(params=["plain", "wide"])
def run(request: pytest.FixtureRequest) -> Outcome:
    return request.getfixturevalue(request.param)


def test_a_run_ends_with_code_0_and_leaves_no_process(run):
    assert run.code == 0, run.out + run.err
    assert run.left_running() == []


def test_there_is_one_line_of_metrics_a_step_and_every_name_is_in_the_catalogue(run):
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    unknown = {name for line in lines for name in line if name != "step" and lookup(name) is None}
    assert not unknown
    expected = {
        "reward/mean", "reward/std", "reward/rewards.py:digits/mean", "policy/loss", "policy/update_kl",
        "policy/entropy", "policy/grad_norm", "policy/clip_fraction", "rollout/tokens", "rollout/tokens_per_second",
        "rollout/length_p50", "rollout/length_p99", "rollout/length_max", "rollout/truncated_fraction",
        "parity/max_abs", "parity/mean_abs", "weights/version", "weights/bytes", "weights/seconds", "time/step",
        "time/other", "busy/policy", "busy/rollout", "busy/reward", "ledger/drawn", "ledger/trained",
    }  # fmt: skip
    for line in lines:
        assert expected <= line.keys()
        assert all(isinstance(value, int | float) for value in line.values())


def test_a_metric_that_does_not_apply_is_absent(plain, wide):
    assert all("policy/kl" not in line and "busy/reference" not in line for line in plain.metrics())
    assert all("policy/kl" in line and "busy/reference" in line for line in wide.metrics())
    # Policy and reference are the same weights in step 1, and bfloat16 log-probs of them are equal.
    assert wide.metrics()[0]["policy/kl"] == pytest.approx(0.0, abs=1e-3)


def test_the_ledger_balances_and_counts_every_sample(run):
    for line in run.metrics():
        assert line["ledger/drawn"] == line["ledger/trained"] == 12 * line["step"]
        left = ("filtered", "failed", "stale", "discarded", "buffered", "in_flight")
        assert all(line[f"ledger/{term}"] == 0 for term in left)


def test_phases_add_up_to_the_step(run):
    for line in run.metrics():
        parts = [v for k, v in line.items() if k.startswith("time/") and k not in ("time/step",)]
        assert sum(parts) == pytest.approx(line["time/step"], rel=1e-6)
        assert line["time/other"] >= 0


def test_weight_versions_count_optimizer_steps_of_the_run_and_rollouts_lag_by_one(run):
    assert [line["weights/version"] for line in run.metrics()] == [1, 2]
    for step in (1, 2):
        table = pq.read_table(run.folder / "trajectories" / f"step-{step:06d}.parquet").to_pydict()
        assert set(table["weight_version"]) == {step - 1}


def test_parity_holds_after_every_sync_and_the_policy_moved(plain, wide):
    for line in plain.metrics():
        assert line["parity/max_abs"] <= 1e-4  # float32
        assert line["policy/grad_norm"] > 0
    for line in wide.metrics():
        assert line["parity/max_abs"] <= 1.0 and line["parity/mean_abs"] <= 0.1  # bfloat16
        assert line["policy/grad_norm"] > 0


def test_trajectories_hold_each_sample_once_with_its_reward_and_advantage(run):
    seen = Counter()
    for step, line in enumerate(run.metrics(), 1):
        rows = pq.read_table(run.folder / "trajectories" / f"step-{step:06d}.parquet").to_pylist()
        seen.update(row["sample_id"] for row in rows)
        assert len(rows) == 12
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(line["reward/mean"])
        for row in rows:
            # One character is one token: ids 4 to 13 are the digits, those below 4 are special and not in the text.
            sampled = [i for i, own in zip(row["token_ids"], row["loss_mask"], strict=True) if own]
            text = [i for i in sampled if i > 3]
            assert row["reward"] == pytest.approx(sum(i <= 13 for i in text) / max(1, len(text)))
            assert sum(row["loss_mask"]) == len([x for x in row["logprobs"] if x == x])
        for group in {row["group_id"] for row in rows}:
            advantages = [row["advantage"] for row in rows if row["group_id"] == group]
            assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert set(seen.values()) == {1}


def test_spans_are_those_of_all_roles_and_belong_to_steps(run):
    spans = [json.loads(line) for line in (run.folder / "spans.jsonl").read_text().splitlines()]
    assert {"driver", "policy", "rollout", "reward"} <= {span["role"] for span in spans}
    assert all(span["end"] >= span["start"] for span in spans)
    steps = {span["span_id"]: span for span in spans if span["name"] == "step"}
    assert sorted(span["step"] for span in steps.values()) == [1, 2]
    phases = [span for span in spans if span["parent"] in steps and span["role"] == "driver"]
    assert {span["name"] for span in phases} == {
        "rollout",
        "score",
        "assemble",
        "estimate",
        "update",
        "sync",
        "account",
    }


def test_the_export_loads_in_transformers_and_differs_from_the_start(run, tiny_untied, tiny_tied):
    start = AutoModelForCausalLM.from_pretrained(tiny_tied if run.folder.name == "wide" else tiny_untied)
    trained = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32)
    moved = [name for name, p in trained.named_parameters() if not torch.equal(p, start.get_parameter(name))]
    assert len(moved) > 10
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "export")
    assert tokenizer("1+1=").input_ids == [5, 76, 5, 84]


def test_the_export_serves_in_vllm_with_the_trained_logprobs(plain):
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        engine = Engine(plain.folder / "export", load_dummy_weights=False)
        ray.get([engine.handle.begin_sync.remote("drain"), engine.handle.commit_sync.remote(0)], timeout=60)
        engine.parity(Trainer(plain.folder / "export"), [5, 76, 5, 84]).check("float32")
    finally:
        ray.shutdown()


def test_config_yaml_is_the_resolved_configuration(wide):
    config = yaml.safe_load((wide.folder / "config.yaml").read_text())
    assert config["policy"]["zero_stage"] == 3
    assert config["rollout"]["sampling"]["temperature"] == 1.0


def test_the_held_out_problems_are_evaluated_once_each_before_and_after(wide):
    lines = [json.loads(line) for line in (wide.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, STEPS]
    assert all(line["eval/problems"] == 3 for line in lines)


def test_plain_output_has_a_line_a_step(run):
    assert [line.split(" |")[0] for line in run.out.splitlines() if line.startswith("step ")] == [
        "step 1/2",
        "step 2/2",
    ]
    assert "parity probe" in run.out


def test_trackers_write_into_the_run_folder(wide):
    assert list((wide.folder / "tensorboard").glob("events*"))
    assert list((wide.folder / "wandb").rglob("*.wandb"))
    # Asked for online, without a key: it falls back and says so.
    assert "offline" in wide.out
