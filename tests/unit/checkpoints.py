"""Small checkpoints, and ways to break them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.checkpoint import Checkpoint, CheckpointStore, Phase

PHASES: tuple[Phase, ...] = ("written", "synced", "manifest", "renamed", "latest", "retained")


def silent(message: str) -> None:
    pytest.fail(f"nothing should be said, but: {message}")


def begin(store: CheckpointStore, step: int) -> Path:
    """Parts as learners and driver write them: two shards and the driver's state."""
    folder = store.begin(step)
    (folder / "policy").mkdir()
    for rank in (0, 1):
        (folder / "policy" / f"rank-{rank}.pt").write_bytes(bytes([step % 256, rank]) * 1000)
    (folder / "driver.json").write_text(json.dumps({"step": step}))
    return folder


def commit(store: CheckpointStore, step: int, **metrics: float) -> Checkpoint:
    return store.commit(
        step,
        weight_version=step,
        config={"run": {"seed": 1}},
        versions={"torch": "2.13.0"},
        metrics={name.replace("_", "/", 1): value for name, value in metrics.items()},
    )


def save(store: CheckpointStore, step: int, **metrics: float) -> Checkpoint:
    begin(store, step)
    return commit(store, step, **metrics)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def latest(store: CheckpointStore) -> str:
    return (store.folder / "latest").read_text()


def truncate(path: Path, size: int = 10) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail
