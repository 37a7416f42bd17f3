"""The command itself in a subprocess, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlhf.cluster.process import trees

ROOT = Path(__file__).parents[2]
RUN_S = 400.0
# Design: nothing of ours is left running 60 s after the end.
LEFT_S = 60.0


def tiny_config(model: Path, runs: Path, name: str) -> dict[str, Any]:
    """A run of two steps on the tiny model, with a reward that differs between its samples."""
    return {
        "run": {"name": name, "dir": str(runs), "steps": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "prompts": {
                "source": "reasoning_gym",
                "task": "chain_sum",
                "size": 40,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            },
            "chat_template": False,
            "max_prompt_tokens": 128,
        },
        "rollout": {
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "max_new_tokens": 12,
            "kv_cache_bytes": 1 << 26,
            "deadline_s": 300,
        },
        "policy": {"learning_rate": 1e-3, "max_tokens_per_microbatch": 512},
        "reward": {"functions": [{"name": f"{Path(__file__).with_name('rewards.py')}:digits"}]},
    }


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str
    folder: Path
    pids: set[int]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def left_running(self) -> list[str]:
        """Processes of the run that are still there after the design's 60 s."""
        deadline = time.monotonic() + LEFT_S
        while (left := [p for p in map(_process, self.pids) if p is not None]) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [" ".join(p.cmdline())[:120] for p in left]


def _process(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


class Command:
    """`python -m rlhf.train` on a configuration, with what it started under observation."""

    def __init__(
        self, config: dict[str, Any], folder: Path, *overrides: str, env: dict[str, str] | None = None
    ) -> None:
        file = folder / f"{config['run']['name']}.yaml"
        file.write_text(yaml.safe_dump(config))
        self.folder = Path(config["run"]["dir"]) / config["run"]["name"]
        self.pids: set[int] = set()
        self._out, self._err = (folder / f"{file.stem}.{kind}" for kind in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.train", "--config", str(file), *overrides],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )

    def observe(self) -> None:
        """Remember every process that the command has started so far."""
        self.pids |= {process.pid for process in trees([self.process.pid])}

    def until(self, ready: Callable[[], bool], seconds: float = RUN_S) -> None:
        """Wait until `ready()`; fails when the command ends or the time is over before."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.observe()
            assert self.process.poll() is None, f"the command ended early:\n{self.output()}"
            assert time.monotonic() < deadline, f"not ready after {seconds:g} s:\n{self.output()}"
            time.sleep(0.2)

    def steps_done(self) -> int:
        """Lines in `metrics.jsonl`."""
        file = self.folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` so far."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def find_role(self, role: str, rank: int = 0) -> int | None:
        """Pid of a role's actor, by the name that Ray gives to its process; None while there is none."""
        self.observe()
        for pid in self.pids:
            process = _process(pid)
            if process is not None and f"ray::{role}-{rank}" in " ".join(process.cmdline()):
                return pid
        return None

    def engine_core_pid(self) -> int:
        """Pid of vLLM's EngineCore: what multiprocessing spawned for the engine's actor.

        By its command line as well as by the title that vLLM gives it, since a title is not set everywhere.
        """
        actor = self.find_role("rollout")
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if process.ppid() == actor and ("EngineCor" in line or "spawn_main" in line):
                    return process.pid
            except psutil.Error:
                continue
        raise AssertionError("no EngineCore")

    def output(self) -> str:
        return self._out.read_text() + self._err.read_text()

    def wait(self, seconds: float = RUN_S) -> Outcome:
        """Wait for the end."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.observe()
            time.sleep(0.2)
        if self.process.poll() is None:
            self.process.kill()
            raise AssertionError(f"not done after {seconds:g} s:\n{self.output()}")
        return Outcome(self.process.returncode, self._out.read_text(), self._err.read_text(), self.folder, self.pids)
