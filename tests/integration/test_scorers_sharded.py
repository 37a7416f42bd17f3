"""Scorers sharded over two ranks (ZeRO-3 inference over gloo): each returns what one replica does.

The two processes run once for the module (`scorer_ranks.py`); the tests read what they found.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.models.batch import pad_batch
from rlhf.models.value import load_value_model
from rlhf.scorers.base import Scorer
from rlhf.scorers.reference import ReferenceScorer
from rlhf.scorers.reward import RewardModelScorer
from rlhf.trajectories import Columns
from tests.integration.scorer_ranks import make_config, make_samples
from tests.tiny import make_tiny_model, make_tiny_reward_model

DEADLINE_S = 240
# Other micro-batches and so another summation order: measured 3e-6 in float32 and 0.03 in bfloat16.
BOUND = 1e-5
BFLOAT16_BOUND = 0.1

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_tiny_model(folder / "untied")
    make_tiny_model(folder / "tied", tied=True)
    make_tiny_reward_model(folder / "reward")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What each rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.integration.scorer_ranks", "--folder", str(folder), "--port", str(port)]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(2):
            with (folder / f"log-{rank}.txt").open("w") as log:
                processes.append(
                    subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=log, stderr=log)
                )
        for rank, process in enumerate(processes):
            assert process.wait(DEADLINE_S) == 0, (folder / f"log-{rank}.txt").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


def replica(scorer: Scorer[Any], samples: list[Any]) -> dict[str, Any]:
    scorer.setup()
    return scorer.score(samples)[1]


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize(("call", "count", "masked"), [(0, 8, False), (1, 1, False), (2, 0, False), (3, 5, True)])
def test_the_ranks_shares_make_up_the_log_probs_of_one_replica(
    found: Found, folder: Path, model: str, call: int, count: int, masked: bool
) -> None:
    samples = make_samples(count, masked)
    expected = replica(ReferenceScorer(make_config(folder / model), 0, 1), samples)
    assert expected.keys() == {sample.sample_id for sample in samples}
    shares = [rank[f"reference {model}"][call] for rank in found]
    assert not shares[0].keys() & shares[1].keys()
    scored = shares[0] | shares[1]
    assert scored.keys() == expected.keys()
    for sample_id, values in expected.items():
        np.testing.assert_allclose(scored[sample_id], values, atol=BOUND)


@pytest.mark.parametrize(("call", "count"), [(0, 8), (1, 1), (2, 0)])
def test_the_ranks_shares_make_up_the_scores_of_one_replica(found: Found, folder: Path, call: int, count: int) -> None:
    expected = replica(RewardModelScorer(make_config(folder / "untied", folder / "reward"), 0, 1), make_samples(count))
    assert len(expected) == count
    assert found[0]["reward"][call] | found[1]["reward"][call] == pytest.approx(expected, abs=BOUND)


def test_rotary_frequencies_are_float32_in_bfloat16_too(found: Found, folder: Path) -> None:
    assert all(set(rank["buffers"].values()) == {torch.float32} for rank in found)
    assert all(any("inv_freq" in name for name in rank["buffers"]) for rank in found)
    config = make_config(folder / "untied", model={"dtype": "bfloat16"})
    expected = replica(ReferenceScorer(config, 0, 1), make_samples())
    scored = found[0]["reference bfloat16"] | found[1]["reference bfloat16"]
    for sample_id, values in expected.items():
        np.testing.assert_allclose(scored[sample_id], values, atol=BFLOAT16_BOUND)


def test_between_calls_a_rank_holds_no_whole_matrix(found: Found) -> None:
    # A partitioned parameter is an empty tensor. What is left are the small ones, the largest of them the key and value
    # projections of 128 x 64; the embedding has 104 x 128 = 13,312 elements.
    assert [rank["largest parameter held"] for rank in found] == [128 * 64] * 2


def test_value_models_load_sharded_with_either_head(found: Found, folder: Path) -> None:
    columns = [sample.columns for sample in make_samples() if isinstance(sample.columns, Columns)]
    with torch.no_grad():
        expected = load_value_model(str(folder / "reward"), "float32", "checkpoint")(pad_batch(columns, "cpu"))
    for rank in found:
        assert not rank["values new"].any() and len(rank["values new"]) == len(expected)
        torch.testing.assert_close(rank["values checkpoint"], expected, atol=BOUND, rtol=0)


def test_a_plain_language_model_is_refused_when_it_is_sharded_too(found: Found) -> None:
    assert all("lacks score.weight, which would be random" in rank["plain language model"] for rank in found)


def test_a_sample_that_contradicts_its_header_fails_on_the_rank_that_has_it(found: Found) -> None:
    # Two samples over two ranks: one each.
    messages = sorted(rank["broken sample"].split(":")[0] for rank in found)
    assert messages == ["sample 0-0", "sample 0-1"]
