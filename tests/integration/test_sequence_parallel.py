"""Learners whose ranks share packed rows, on real DeepSpeed over gloo: the same as one rank alone.

The processes run once for the module (`sequence_ranks.py`); the tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.learner_ranks import make_samples
from tests.integration.sequence_ranks import DEADLINE_S, RUNS, STAGES
from tests.integration.test_learner import BFLOAT16_BOUND, FLOAT32_BOUND, relative
from tests.tiny import make_tiny_model, make_tiny_reward_model

SHARED = [run for run, (_, sharing) in RUNS.items() if sharing > 1]
# What an update says of the batch, and not of the machine.
OF_POLICY = (
    "policy/loss", "policy/grad_norm", "policy/entropy", "policy/update_kl", "policy/clip_fraction", "policy/ratio_max",
    "parity/mean_abs", "parity/max_abs", "parity/kl",
)  # fmt: skip
OF_CRITIC = (
    "critic/loss", "critic/grad_norm", "critic/value_mean", "critic/return_mean", "critic/clip_fraction",
    "critic/explained_variance",
)  # fmt: skip
# What each rank of each run found.
Found = dict[str, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("sequence")
    make_tiny_model(folder / "untied")
    make_tiny_reward_model(folder / "reward")
    command = [sys.executable, "-m", "tests.integration.sequence_ranks", "--models", folder, "--out", folder]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S + 60,
    )
    assert done.returncode == 0, done.stdout
    return {
        run: [torch.load(folder / f"found-{run}-{rank}.pt", weights_only=False) for rank in range(world)]
        for run, (world, _) in RUNS.items()
    }


def assert_same_metrics(updates: list[dict[str, float]], alone: list[dict[str, float]], names: tuple[str, ...]) -> None:
    assert len(updates) == len(alone) == 2
    for metrics, expected in zip(updates, alone, strict=True):
        for name in names:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("run", SHARED)
@pytest.mark.parametrize("stage", STAGES)
class TestPolicy:
    @pytest.mark.parametrize("layout", ["one row", "several rows", "one sample", "after dry run"])
    def test_loss_and_gradients_are_those_of_one_rank(self, found: Found, run: str, stage: int, layout: str) -> None:
        key, what = f"policy {stage}", f"gradients, {layout}"
        alone = found["alone"][0][key][what]
        for rank in found[run]:
            assert relative(rank[key][what], alone) < FLOAT32_BOUND

    def test_updates_report_what_one_rank_reports(self, found: Found, run: str, stage: int) -> None:
        key = f"policy {stage}"
        for rank in found[run]:
            assert_same_metrics(rank[key]["metrics"], found["alone"][0][key]["metrics"], OF_POLICY)

    def test_updates_leave_the_weights_of_one_rank(self, found: Found, run: str, stage: int) -> None:
        # Softmax does not see a key bias: its gradient is rounding, which Adam scales up to full steps.
        alone, *ranks = (
            {name: weight for name, weight in rank[f"policy {stage}"]["weights"].items() if "k_proj.bias" not in name}
            for rank in (*found["alone"], *found[run])
        )
        # Measured 6.7e-6 after eight optimizer steps.
        assert all(relative(weights, alone) < 1e-4 for weights in ranks)


def assert_scores_come_once(ranks: list[dict[str, Any]], alone: dict[str, Any], sharing: int) -> None:
    """The first of each group of ranks returns scores, and those of all groups are those of one rank."""
    returned = [rank["scores"] for rank in ranks]
    assert all(bool(scores) == (rank % sharing == 0) for rank, scores in enumerate(returned))
    assert sum(map(len, returned)) == len(alone)
    for scores in returned:
        for sample_id, values in scores.items():
            np.testing.assert_allclose(values, alone[sample_id], atol=1e-5)


@pytest.mark.parametrize("run", SHARED)
@pytest.mark.parametrize("key", ["policy 1", "policy 2", "policy 3", "adapters", "critic"])
def test_each_sample_is_scored_once(found: Found, run: str, key: str) -> None:
    alone = found["alone"][0][key]["scores"]
    assert alone.keys() == {sample.sample_id for sample in make_samples()}
    assert_scores_come_once([rank[key] for rank in found[run]], alone, RUNS[run][1])


def test_ranks_that_share_rows_draw_the_same_random_numbers(found: Found) -> None:
    first, second, third, fourth = (rank["policy 1"]["drawn"] for rank in found["two times two that share"])
    assert first == second == found["alone"][0]["policy 1"]["drawn"]
    assert third == fourth != first


@pytest.mark.parametrize("run", SHARED)
def test_gradients_of_a_bfloat16_model_are_those_of_one_rank_within_rounding(found: Found, run: str) -> None:
    alone = found["alone"][0]["bfloat16"]["gradients"]
    for rank in found[run]:
        assert relative(rank["bfloat16"]["gradients"], alone) < BFLOAT16_BOUND


@pytest.mark.parametrize("run", SHARED)
def test_updates_of_adapters_are_those_of_one_rank(found: Found, run: str) -> None:
    alone = found["alone"][0]["adapters"]
    for rank in found[run]:
        assert_same_metrics(rank["adapters"]["metrics"], alone["metrics"], OF_POLICY)
        assert relative(rank["adapters"]["adapters"], alone["adapters"]) < 1e-4


@pytest.mark.parametrize("run", SHARED)
class TestCritic:
    def test_loss_and_gradients_are_those_of_one_rank(self, found: Found, run: str) -> None:
        alone = found["alone"][0]["critic"]["gradients"]
        for rank in found[run]:
            assert relative(rank["critic"]["gradients"], alone) < FLOAT32_BOUND

    def test_updates_report_what_one_rank_reports(self, found: Found, run: str) -> None:
        for rank in found[run]:
            assert_same_metrics(rank["critic"]["metrics"], found["alone"][0]["critic"]["metrics"], OF_CRITIC)
