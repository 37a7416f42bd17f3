"""`run.deterministic` repeats a run bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.e2e.command import Command, tiny_config

pytestmark = pytest.mark.full


def deterministic_run(model: Path, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Sampled ids, log-probs and final weights of a run of two steps."""
    config = tiny_config(model, folder / "runs", name)
    outcome = Command(config, folder, "run.deterministic=true", f"run.seed={seed}").wait()
    assert outcome.code == 0, outcome.out + outcome.err
    assert all(line["policy/grad_norm"] > 0 for line in outcome.metrics())
    samples = [
        (row["sample_id"], tuple(row["token_ids"]), tuple(repr(x) for x in row["logprobs"]))
        for step in (1, 2)
        for row in pq.read_table(outcome.folder / "trajectories" / f"step-{step:06d}.parquet").to_pylist()
    ]
    weights = {k: v.tobytes() for k, v in load_file(outcome.folder / "export" / "model.safetensors").items()}
    return {"samples": sorted(samples), "weights": weights}


def test_the_same_seed_gives_the_same_samples_and_weights_and_another_seed_does_not(
    tiny_untied: Path, tmp_path: Path
) -> None:
    first, again, other = (
        deterministic_run(tiny_untied, tmp_path, name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    assert first["samples"] != other["samples"]
    assert first["weights"] != other["weights"]
