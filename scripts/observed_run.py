"""The training command as scripts start it, watch it, kill its processes and read what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlhf.cluster.process import trees

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0
# Nothing of a run may be left this long after its end.
LEFT_S = 60.0
COMMAND = ("-m", "rlhf.train")
# A reward function that tells the samples of any model apart.
REWARD = f"{Path(__file__).with_name('observed_reward.py')}:digits"


def configuration(name: str, model: Path, seed: int, prompts: int) -> dict[str, Any]:
    """What observed runs have in common: float32, short sums from `prompts` problems, and a reward for any model."""
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {
        "run": {"name": name, "seed": seed},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "prompts": {"source": "reasoning_gym", "task": "chain_sum", "size": prompts, "options": task},
            "chat_template": False,
            "max_prompt_tokens": 128,
        },
        "rollout": {"samples_per_prompt": 4, "kv_cache_bytes": 1 << 26},
        "reward": {"functions": [{"name": REWARD}]},
    }


class Broken(Exception):
    """The run did what it must not do."""


class ObservedRun:
    """One run of a configuration, started as often as it takes, in the folder `work`."""

    def __init__(self, config: dict[str, Any], work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        name = config["run"]["name"]
        self.folder = work / "runs" / name
        # Not their pids alone: those of processes that have ended come again.
        self.processes: set[psutil.Process] = set()
        self._work = work
        self._file = work / f"{name}.yaml"
        self._file.write_text(yaml.safe_dump({**config, "run": {**config["run"], "dir": str(work / "runs")}}))
        self._log = work / f"{name}.log"

    def start(self, *overrides: str, command: Sequence[str] = COMMAND) -> None:
        """Start the command, or start it again."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--config", str(self._file), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._work,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            )

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for `ready()`; raises `Broken` when the command ends before, or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            self.observe()
            if self.process.poll() is not None:
                raise Broken(f"{what}: the command ended with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Broken(f"{what}: not after {PATIENCE_S:g} s\n{self.tail()}")
            time.sleep(0.2)

    def finish(self) -> None:
        """Wait for the end; raises `Broken` unless the exit code is 0."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.observe()
            time.sleep(0.2)
        if self.process.poll() != 0:
            raise Broken(f"the command ended with {self.process.poll()}\n{self.tail()}")

    def observe(self) -> list[psutil.Process]:
        """Processes of the run; remembers them."""
        found: list[psutil.Process] = trees([self.process.pid])
        self.processes |= set(found)
        return found

    def left(self) -> list[str]:
        """Titles of the run's processes that are still there after the time in which all have to be gone."""
        deadline = time.monotonic() + LEFT_S
        while (left := [p for p in self.processes if _lives(p)]) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [f"{process.pid} {title(process.pid)}"[:120] for process in left]

    def lines(self) -> list[dict[str, Any]]:
        """`metrics.jsonl` so far, without a torn last line."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def done(self) -> int:
        """The last step that was written down."""
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    def saved(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        latest = self.folder / "checkpoints" / "latest"
        return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0

    def tail(self, lines: int = 25) -> str:
        """The last lines of what the command said."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def title(pid: int) -> str:
    """The title of a process, as `ps` shows it: Ray puts the method in it that an actor is computing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _lives(process: psutil.Process) -> bool:
    """Whether the process is there; a zombie isn't, and neither is another one of the same number."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
