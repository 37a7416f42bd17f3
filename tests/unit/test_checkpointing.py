"""Checkpoints as the driver makes them: when, in what order, and what a failed one does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.checkpoint import StateError
from rlhf.cluster.preflight import Refused
from rlhf.config import Config
from rlhf.trainers.checkpointing import (
    Checkpointer,
    FrozenModels,
    check_initial_weights,
    choose_checkpoint,
    is_finished,
    open_store,
)
from tests.unit.configs import build


class Learners:
    """Learners that save and load at once; `gate` holds the writing until it is set."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.version = 0

    async def save(self, folder: Path) -> list[Any]:
        self.log.append(("save", folder.name))
        (folder / "policy").mkdir()
        (folder / "policy" / "shard").write_text(str(self.version))
        return [SimpleNamespace(bytes=7), SimpleNamespace(bytes=5)]

    async def finish_save(self, deadline_s: float) -> list[Any]:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.log.append("written")
        return [SimpleNamespace(waited=0.25), SimpleNamespace(waited=0.5)]

    async def load(self, folder: Path, on_world_size_change: str) -> dict[str, list[Any]]:
        self.version = int((folder / "policy" / "shard").read_text())
        # A critic counts its one batch of warm-up as well.
        return {
            "policy": [SimpleNamespace(version=self.version)],
            "critic": [SimpleNamespace(version=self.version + 1)],
        }


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class Bench:
    def __init__(self, folder: Path, **changes: Any) -> None:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        self.config = config(folder, **changes)
        self.learners, self.counter, self.said = Learners(), Counter(), list[str]()
        self.store = open_store(self.config)
        self.checkpoints = Checkpointer(self.config, self.store, self.learners, self.said.append)  # type: ignore[arg-type]
        self.checkpoints.registry.register("counter", self.counter)

    async def step(self, step: int) -> dict[str, float]:
        self.learners.version = self.counter.count = step
        saved = await self.checkpoints.snapshot(step, {"reward/mean": 0.5})
        self.checkpoints.write_behind()
        return saved

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.store.checkpoints()]


def config(folder: Path, **changes: Any) -> Config:
    settings = {
        "run.dir": str(folder),
        "run.name": "saved",
        "run.steps": 5,
        "model.path": str(folder / "model"),
        "checkpoint.every": 2,
        "algorithm.advantage": "gae",
        "critic.warmup_batches": 1,
        "checkpoint.keep": 9,
    }
    return build({**settings, **changes})


async def test_every_second_step_and_the_last_one_are_saved_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    saved = [await bench.step(step) for step in range(1, 6)]
    await bench.checkpoints.finish()
    assert bench.steps() == [2, 4, 5]
    assert ["checkpoint/wait_seconds" in figures for figures in saved] == [False, True, False, True, True]
    assert saved[1]["checkpoint/bytes"] == 12
    manifest = bench.store.checkpoints()[-1]
    assert (manifest.weight_version, manifest.metrics) == (5, {"reward/mean": 0.5})


async def test_what_optimizer_steps_waited_for_the_copy_is_told_once_it_is_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpoints.finish()
    assert await bench.step(3) == {"checkpoint/held_seconds": 0.5}


async def test_a_run_without_checkpoints_writes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{"checkpoint.every": 0, "checkpoint.keep": 2})
    assert await bench.step(5) == {}
    assert not bench.store.folder.exists()


async def test_steps_go_on_while_files_are_written_and_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learners.gate.clear()
    await bench.step(2)
    await bench.step(3)
    second = asyncio.ensure_future(bench.step(4))
    await asyncio.sleep(0.02)
    assert not second.done() and bench.steps() == []
    bench.learners.gate.set()
    await second
    await bench.checkpoints.finish()
    assert bench.learners.log == [
        ("save", ".writing-step-000002"),
        "written",
        ("save", ".writing-step-000004"),
        "written",
    ]


async def test_a_save_that_fails_is_raised_at_the_next_step_and_leaves_the_one_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpoints.finish()
    bench.learners.failure = OSError(28, "No space left on device", "/runs/x")
    await bench.step(4)
    await asyncio.sleep(0.01)
    with pytest.raises(OSError, match="No space left"):
        await bench.step(5)
    assert bench.steps() == [2]
    assert [path.name for path in bench.store.folder.iterdir() if path.name.startswith(".")] == []


async def test_a_save_that_fails_is_only_told_where_the_configuration_says_continue(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{"checkpoint.on_failed_save": "continue"})
    bench.learners.failure = OSError(28, "No space left on device", "/runs/x")
    await bench.step(2)
    await bench.step(4)
    await asyncio.sleep(0.01)
    bench.learners.failure = None
    await bench.step(5)
    await bench.checkpoints.finish()
    assert bench.steps() == [5]
    assert [line for line in bench.said if "step 2 could not be saved, and the run goes on" in line]


async def test_a_save_that_is_given_up_leaves_nothing_half_written_and_can_be_made_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learners.gate.clear()
    await bench.step(2)
    await asyncio.sleep(0.01)
    await bench.checkpoints.close()
    assert list(bench.store.folder.iterdir()) == []
    bench.learners.gate.set()
    await bench.step(2)
    await bench.checkpoints.finish()
    assert bench.steps() == [2]


async def test_restoring_brings_the_driver_and_the_learners_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpoints.finish()
    again = Bench(tmp_path, **{"run.if_exists": "resume"})
    chosen = choose_checkpoint(again.config, again.store, again.said.append)
    assert chosen is not None and chosen.step == 2
    await again.checkpoints.restore(chosen)
    assert (again.counter.count, again.learners.version) == (2, 2)


async def test_a_learner_of_another_version_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learners.version = 1
    await bench.checkpoints.snapshot(2, {})
    bench.checkpoints.write_behind()
    await bench.checkpoints.finish()
    with pytest.raises(StateError, match="the policy has done 1 updates where 2 are due"):
        await bench.checkpoints.restore(bench.store.checkpoints()[0])


async def test_a_change_of_what_the_run_means_is_refused_and_any_other_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.step(2)
    await bench.checkpoints.finish()
    resume = {"run.if_exists": "resume"}
    with pytest.raises(Refused, match=r"(?s)another meaning.*run\.seed: 1 -> 7"):
        choose_checkpoint(config(tmp_path, **resume, **{"run.seed": 7}), bench.store, bench.said.append)
    assert choose_checkpoint(config(tmp_path, **resume, **{"run.steps": 9}), bench.store, bench.said.append)
    assert [line for line in bench.said if line.startswith("since step-000002: ") and "run.steps: 5 -> 9" in line]
    assert not [line for line in bench.said if "if_exists" in line]


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
async def test_weights_are_not_taken_from_a_checkpoint_that_has_adapters_only(tmp_path: Path, lora: Any) -> None:
    bench = Bench(tmp_path, **{"policy.lora": lora})
    await bench.step(2)
    await bench.checkpoints.finish()
    other = config(tmp_path, **{"checkpoint.init_from": str(bench.store.checkpoints()[0].path)})
    if lora is None:
        check_initial_weights(other)
    else:
        with pytest.raises(Refused, match=r"has no weights to start from\. Give the export of that run as model\.path"):
            check_initial_weights(other)


def test_nothing_is_resumed_that_was_not_asked_for(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert choose_checkpoint(settings, open_store(settings), print) is None


async def test_a_run_is_finished_when_its_last_step_is_saved_and_exported_after_that(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    export = tmp_path / "saved" / "export"
    export.mkdir(parents=True)  # left by a shorter run
    await asyncio.sleep(0.02)
    for step in (2, 4, 5):
        await bench.step(step)
    await bench.checkpoints.finish()
    last = bench.store.checkpoints()[-1]
    assert not is_finished(bench.config, last, export)
    export.rmdir()
    assert not is_finished(bench.config, last, export)
    await asyncio.sleep(0.02)
    export.mkdir()
    assert is_finished(bench.config, last, export)
    assert not is_finished(bench.config, bench.store.checkpoints()[-2], export)


def test_another_frozen_model_is_refused_by_its_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    state = json.loads(json.dumps(FrozenModels(bench.config).state_dict()))
    FrozenModels(bench.config).load_state_dict(state)
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(StateError, match=r"model: .*config\.json"):
        FrozenModels(bench.config).load_state_dict(state)
