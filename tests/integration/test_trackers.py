"""Trackers with the real packages: wandb and TensorBoard, what they write and what they must not."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator

from rlhf.config import Config
from rlhf.tracking import wandb_tracker
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.spans import Span
from rlhf.tracking.tensorboard_tracker import TensorBoardTracker
from rlhf.trainers.journal import Journal

API_KEY = "0123456789abcdef" * 3
OVERRIDE_SECRET = "override-secret-5ea1"
CONFIG_SECRET = "config-secret-c0de"

# One whole run of the tracker in a process of its own, as wandb starts a service and reads the environment only once.
WANDB_RUN = """
import json, os, sys
from rlhf.config import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking import wandb_tracker

wandb_tracker.INIT_TIMEOUT_S = 3.0
config = Config.model_validate(json.loads(sys.argv[1]))
folder = RunFolder.open(config.run)
tracker = wandb_tracker.WandbTracker(lambda line: print("SHOWN", line))
tracker.start(config, folder)
for step in (1, 2):
    tracker.log({"reward/mean": 0.5 * step, "policy/loss": float("nan")}, step)
tracker.log({"eval/accuracy": 0.25}, 2)
tracker.finish("done")
print("ENVIRONMENT", "WANDB_CACHE_DIR" in os.environ)
"""


# Steps 1 to 4 with an evaluation after the second, a rewind to step 2, and steps 3 to 5 with ten times the reward; in
# one process, or a process for each part.
REWOUND_RUN = """
import json, sys
from rlhf.config import Config
from rlhf.tracking import wandb_tracker
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.jsonlines import JsonLinesLog, MetricsLog
from rlhf.tracking.rewind import rewind

config = Config.model_validate(json.loads(sys.argv[1]))
folder = RunFolder.open(config.run)
tracker = wandb_tracker.WandbTracker(print)
tracker.start(config, folder)

def log(steps, reward):
    metrics, evaluations = MetricsLog(folder.metrics_jsonl), JsonLinesLog(folder.evaluations_jsonl)
    for step in steps:
        if step == 2:
            evaluations.append({"step": 2, "eval/accuracy": 0.25})
            tracker.log({"eval/accuracy": 0.25}, 2)
        line = {"reward/mean": reward * step, "policy/loss": float("nan")}
        metrics.write(step, line)
        tracker.log(line, step)

if "first" in sys.argv:
    tracker.rewind(None)
    log(range(1, 5), 1.0)
if "second" in sys.argv:
    rewind(folder, 2)
    tracker.rewind(2)
    log(range(3, 6), 10.0)
tracker.finish("done")
"""


def make_config(run_dir: Path, mode: str = "offline", if_exists: str = "refuse") -> Config:
    return Config.model_validate(
        {
            "run": {"name": "try", "dir": run_dir, "if_exists": if_exists},
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "judge.py:score", "options": {"api_key": CONFIG_SECRET}}]},
            "tracking": {"wandb": {"mode": mode}, "tensorboard": True},
        }
    )


def wandb_run(tmp_path: Path, mode: str, **environment: str) -> str:
    """Run the tracker with a home and a current folder of its own; returns what it showed."""
    config = make_config(tmp_path / "runs", mode)
    shown = run_script(tmp_path, WANDB_RUN, config, f"judge.key={OVERRIDE_SECRET}", **environment)
    assert "ENVIRONMENT False" in shown
    return shown


def run_script(tmp_path: Path, script: str, config: Config, *arguments: str, **environment: str) -> str:
    for name in ("home", "cwd", "runs"):
        (tmp_path / name).mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path / "home"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", script, config.model_dump_json(), *arguments],
        cwd=tmp_path / "cwd",
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def transaction_log(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of 7 bytes.

    Blocks of 32 KiB hold fragments, each with a checksum (4 bytes), a length (2), a type (1 whole, 2 first, 3 middle,
    4 last) and the data; a rest of less than 7 bytes at the end of a block is padding.
    """
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def logged_offline(run: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """History and configuration in wandb's transaction log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    history: dict[str, list[float]] = {}
    config: dict[str, Any] = {}
    for data in transaction_log(path):
        record = Record.FromString(data)
        for item in record.history.item:
            history.setdefault(item.key or item.nested_key[0], []).append(json.loads(item.value_json))
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return history, config


def test_wandb_offline_holds_metrics_and_config_in_the_run_folder(tmp_path: Path) -> None:
    shown = wandb_run(tmp_path, "offline", WANDB_API_KEY=API_KEY)
    run = tmp_path / "runs" / "try"
    history, config = logged_offline(run)
    assert history["reward/mean"] == [0.5, 1.0]
    assert history["_step"] == [1, 2]
    assert history["eval/accuracy"] == [0.25]  # an evaluation after step 2, in the line of step 2
    assert config["policy"]["learning_rate"] == 1e-5
    assert f"SHOWN wandb: offline in {run / 'wandb'}" in shown


def test_wandb_writes_nothing_outside_the_run_folder(tmp_path: Path) -> None:
    wandb_run(tmp_path, "offline", WANDB_API_KEY=API_KEY)
    assert files_below(tmp_path / "home") + files_below(tmp_path / "cwd") == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["try"]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_no_secret_is_on_disk(tmp_path: Path, mode: str) -> None:
    # Nobody listens on port 9: online goes as far as it can with the key and falls back.
    wandb_run(tmp_path, mode, WANDB_API_KEY=API_KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    written = files_below(tmp_path)
    assert any(path.suffix == ".wandb" for path in written)
    for secret in (API_KEY, OVERRIDE_SECRET, CONFIG_SECRET):
        assert [str(path) for path in written if secret.encode() in path.read_bytes()] == []


def test_online_without_a_key_goes_offline_and_says_so(tmp_path: Path) -> None:
    shown = wandb_run(tmp_path, "online")
    assert "SHOWN wandb: no API key is configured (WANDB_API_KEY or `wandb login`); going on offline" in shown
    assert logged_offline(tmp_path / "runs" / "try")[0]["reward/mean"] == [0.5, 1.0]


def test_online_without_an_answer_goes_offline_and_says_so(tmp_path: Path) -> None:
    shown = wandb_run(tmp_path, "online", WANDB_API_KEY=API_KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "SHOWN wandb: the server can't be used (" in shown and "; going on offline" in shown
    assert logged_offline(tmp_path / "runs" / "try")[0]["reward/mean"] == [0.5, 1.0]


def test_wandb_service_ends_with_the_run(tmp_path: Path) -> None:
    wandb_run(tmp_path, "offline", WANDB_API_KEY=API_KEY)
    # The service carries our HOME in its environment. It gets a moment to leave after its parent.
    ours = [process for process in psutil.process_iter() if _home_of(process) == str(tmp_path / "home")]
    assert psutil.wait_procs(ours, timeout=60)[1] == []


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("HOME")
    except psutil.Error:
        return None


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = RunFolder.open(config.run)
    tracker = TensorBoardTracker()
    tracker.start(config, folder)
    tracker.rewind(None)
    tracker.log({"reward/mean": 0.5, "rollout/tokens": 640, "policy/loss": float("nan")}, 1)
    tracker.log({"reward/mean": 0.75}, 2)
    # Before `finish`: a run that is killed leaves the steps that it logged.
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("rollout/tokens")] == [(1, 640.0)]
    assert math.isnan(events.Scalars("policy/loss")[0].value)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "learning_rate: 1.0e-05" in text
    assert CONFIG_SECRET not in text
    tracker.finish("done")
    assert [path.parent for path in files_below(folder.path) if "tfevents" in path.name] == [folder.tensorboard]


def rewound(folder: RunFolder, attempts: list[tuple[int | None, range, float]], *, same_process: bool) -> None:
    """Log reward x step for each attempt, which goes on after a step, with one tracker or with one for each."""
    config = make_config(folder.path.parent)
    tracker = TensorBoardTracker()
    tracker.start(config, folder)
    for number, (after, steps, reward) in enumerate(attempts):
        if number and not same_process:
            # It was killed: nothing was finished.
            tracker = TensorBoardTracker()
            tracker.start(config, folder)
        tracker.rewind(after)
        for step in steps:
            tracker.log({"reward/mean": reward * step}, step)


def shown_by_tensorboard(folder: RunFolder, tag: str) -> list[tuple[int, Any]]:
    """Step and value of each point, read as TensorBoard's own server does, where a scalar is a tensor as well."""
    events = PluginEventAccumulator(str(folder.tensorboard)).Reload()
    return [(event.step, event.tensor_proto) for event in events.Tensors(tag)]


@pytest.mark.parametrize("same_process", [True, False])
def test_tensorboard_shows_each_step_once_after_a_rewind(tmp_path: Path, same_process: bool) -> None:
    folder = RunFolder(tmp_path / "try")
    rewound(folder, [(None, range(5), 1.0), (2, range(3, 6), 10.0)], same_process=same_process)
    # Steps 3 and 4 of the first attempt are gone.
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert [(step, tensor.float_val[0]) for step, tensor in shown_by_tensorboard(folder, "reward/mean")] == expected
    # The configuration of the start, and that of step 3 and later.
    assert [step for step, _ in shown_by_tensorboard(folder, "config/text_summary")] == [0, 3]


def test_a_journal_that_is_rewound_takes_its_trackers_along(tmp_path: Path) -> None:
    config = make_config(tmp_path, mode="disabled")
    with Journal.open(config) as journal:
        for after, steps in ((None, (1, 2, 3)), (1, (2,))):
            journal.rewind(after)
            for step in steps:
                spans = [Span("step", "driver", step, step, step + 1.0, f"s{step}", None)]
                journal.step(step, {"reward/mean": 10.0 * len(steps) + step}, spans)
    shown = shown_by_tensorboard(RunFolder(tmp_path / "try"), "reward/mean")
    # Of the first attempt, with three steps, step 1 is kept; the second had one.
    assert [(step, tensor.float_val[0]) for step, tensor in shown] == [(1, 31.0), (2, 12.0)]


def test_tensorboard_forgets_an_attempt_that_begins_anew(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "try")
    rewound(folder, [(None, range(3), 1.0), (None, range(2), 10.0)], same_process=False)
    shown = shown_by_tensorboard(folder, "reward/mean")
    assert [(step, tensor.float_val[0]) for step, tensor in shown] == [(0, 0.0), (1, 10.0)]
    assert [step for step, _ in shown_by_tensorboard(folder, "config/text_summary")] == [0]


@pytest.mark.parametrize("parts", [["first second"], ["first", "second"]], ids=["one process", "two processes"])
def test_wandb_offline_has_each_step_once_after_a_rewind(tmp_path: Path, parts: list[str]) -> None:
    config = make_config(tmp_path / "runs", if_exists="resume")
    folder = RunFolder(tmp_path / "runs" / "try")
    ids = set()
    for part in parts:
        run_script(tmp_path, REWOUND_RUN, config, *part.split())
        ids.add((folder.path / wandb_tracker.RUN_ID).read_text())
    assert len(ids) == 1
    # The one part that `wandb sync` finds; the steps before the rewind were written again.
    assert [path.stem for path in folder.path.glob("wandb/offline-run-*/*.wandb")] == [f"run-{ids.pop()}"]
    history, _ = logged_offline(folder.path)
    assert history["_step"] == [1, 2, 3, 4, 5]
    assert history["reward/mean"] == [1.0, 2.0, 30.0, 40.0, 50.0]
    assert history["eval/accuracy"] == [0.25]
    assert all(value is None or math.isnan(float(value)) for value in history["policy/loss"])
    # What was logged of the steps that were done again is set aside, and not lost.
    (aside,) = (folder.path / "wandb" / wandb_tracker.REWOUND).iterdir()
    assert [path.suffix for path in aside.glob("*.wandb")] == [".wandb"]


def test_trackers_import_neither_their_packages_nor_torch_until_they_start() -> None:
    code = (
        "import sys\n"
        "import rlhf.tracking.trackers, rlhf.tracking.console, rlhf.tracking.wandb_tracker, "
        "rlhf.tracking.tensorboard_tracker, rlhf.tracking.metrics, rlhf.tracking.samples, rlhf.tracking.summary\n"
        "print([m for m in ('wandb', 'tensorboard', 'rich', 'pyarrow', 'torch', 'ray', 'vllm') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_another_does_not(tmp_path: Path) -> None:
    folder, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    folder.path.mkdir()
    other.path.mkdir()
    assert wandb_tracker._run_id(folder) == wandb_tracker._run_id(folder) != wandb_tracker._run_id(other)
