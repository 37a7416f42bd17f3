"""Interrupted equals uninterrupted: the same trajectories and the same weights, bit for bit, after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.command import Command, Outcome, tiny_config

END_S = 60.0
STEPS = 6


def one_rank(model: Path, folder: Path) -> dict[str, Any]:
    """GRPO on one rank, with Adam's state, a decaying learning rate and clipping that all have to come back."""
    config = tiny_config(model, folder / "runs", "grpo")
    config["policy"] |= {"schedule": "linear", "minibatches": 2}
    return config


def two_ranks(model: Path, folder: Path) -> dict[str, Any]:
    """PPO with a critic, both on two ranks, and KL whose coefficient follows a controller."""
    config = tiny_config(model, folder / "runs", "ppo")
    kl = {"where": "reward", "coefficient": 0.05, "controller": "adaptive", "target": 0.001, "horizon": 50}
    config["algorithm"] = {"advantage": "gae", "kl": kl}
    config["policy"] |= {"ranks": 2, "zero_stage": 2}
    config["critic"] = {"ranks": 2, "learning_rate": 1e-3, "warmup_batches": 1}
    return config


def deterministic(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The same run under another name, saved every third step."""
    run = {**config["run"], "name": name, "steps": STEPS, "deterministic": True}
    return {**config, "run": run, "checkpoint": {"every": 3}}


def saved(command: Command, step: int) -> bool:
    latest = command.folder / "checkpoints" / "latest"
    return latest.exists() and latest.read_text().strip() == f"step-{step:06d}"


@pytest.mark.parametrize("setup", [one_rank, two_ranks], ids=["grpo", "ppo_with_critic"])
def test_a_run_that_is_killed_and_resumed_ends_like_one_that_was_not(
    setup: Any, tiny_untied: Path, tmp_path: Path
) -> None:
    config = setup(tiny_untied, tmp_path)
    whole = Command(deterministic(config, "whole"), tmp_path).wait()
    assert whole.code == 0, whole.err

    cut = deterministic(config, "cut")
    first = Command(cut, tmp_path)
    first.until(lambda: saved(first, 3))
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.wait(END_S).left_running() == []
    resumed = Command(cut, tmp_path, "run.if_exists=resume").wait()
    assert resumed.code == 0, resumed.err
    assert "goes on after step 3" in resumed.out

    assert [line["step"] for line in resumed.metrics()] == list(range(1, STEPS + 1))
    for before, after in zip(whole.metrics(), resumed.metrics(), strict=True):
        assert after["policy/grad_norm"] > 0
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/learning_rate", "ledger/trained"):
            assert before[name] == after[name], (name, before["step"])
        assert before.get("policy/kl_coefficient") == after.get("policy/kl_coefficient")
    for step in range(1, STEPS + 1):
        assert samples(whole, step) == samples(resumed, step)
    weights, again = (load_file(outcome.folder / "export" / "model.safetensors") for outcome in (whole, resumed))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)

    # Once more: there is nothing left to do, and nothing is done.
    lines = (resumed.folder / "metrics.jsonl").read_bytes()
    third = Command(cut, tmp_path, "run.if_exists=resume").wait()
    assert third.code == 0 and "finished already" in third.err
    assert (resumed.folder / "metrics.jsonl").read_bytes() == lines


def samples(outcome: Outcome, step: int) -> list[str]:
    """What was trained on in a step, to the last digit; as text, in which NaN equals NaN."""
    rows = pq.read_table(outcome.folder / "trajectories" / f"step-{step:06d}.parquet").to_pylist()
    return [repr(row) for row in rows]


def test_a_lost_learner_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tiny_untied: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_untied, tmp_path / "runs", "recovers")
    config["checkpoint"] = {"every": 2, "keep": 1}
    command = Command(config, tmp_path, "run.steps=100000", "fault_tolerance.max_restarts=1", "policy.ranks=2")
    command.until(lambda: saved(command, 2))
    pid = command.find_role("policy", 1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    command.until(lambda: "goes on after step" in command.output())
    start = int(command.output().rpartition("goes on after step ")[2].partition(",")[0])
    command.until(lambda: command.metrics()[-1]["step"] >= start + 3)
    command.process.send_signal(signal.SIGINT)
    outcome = command.wait(END_S)
    assert outcome.code == 130
    assert f"restart 1 of 1: policy rank 1 (pid {pid}" in outcome.out
    steps = outcome.metrics()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        assert line["ledger/drawn"] == line["ledger/trained"] == 12 * line["step"]
    assert all(line["ledger/redone"] % 12 == 0 for line in steps)
    assert outcome.left_running() == []
