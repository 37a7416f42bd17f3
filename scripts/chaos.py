"""Train a small model while killing its processes, and check that the run loses nothing.

    python scripts/chaos.py --kills 4 --seed 1
    python scripts/chaos.py --kills 50 --seed 7 --keep      # by hand, in the background; keeps the run folder

Each kill is a SIGKILL placed in a phase of the run: in a rollout, in a bucket of a sync, in an optimizer step, while
shards are written, between a checkpoint's rename and the move of `latest`. The victim is the driver, a learner, an
engine's actor, its EngineCore or the reward actor. After a kill the run has to complete another
step: by itself, or, when the driver was the victim, by the same command again with `run.if_exists=resume`. At the end
it has to exit with 0, have each step once, a ledger that balances in every step, a checkpoint whose checksums match,
and nothing left running.

The phases covered are printed; the JSON object is the last line. Exit code 0 only if all of that held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from rich.table import Table

from rlhf.checkpoint import CheckpointError, CheckpointStore
from rlhf.cluster.process import trees

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES = 4, 4
PATIENCE_S = 600.0
LEFT_S = 60.0
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class Lost(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and in which phase."""

    phase: str
    victim: str


# Which victims make sense in which phase.
KILLS = tuple(
    Kill(phase, victim)
    for phase, victims in {
        "rollout": ("engine", "engine_core", "driver", "reward"),
        "bucket": ("policy", "engine", "driver"),
        "update": ("policy", "driver"),
        "writing": ("policy", "driver"),
        "renamed": ("driver",),
    }.items()
    for victim in victims
)


def length(samples: Sequence[Any]) -> list[float]:
    """The reward of this run: it differs between the samples of a random model."""
    return [len(sample.response) / 100 for sample in samples]


class Run:
    """The command, started as often as its driver is killed, and its folder."""

    def __init__(self, folder: Path, model: Path, seed: int) -> None:
        self.folder = folder / "runs" / "chaos"
        self._work = folder
        self._file = folder / "chaos.yaml"
        self._file.write_text(yaml.safe_dump(configuration(folder, model, seed)))
        self._log = (folder / "chaos.log").open("ab")
        self.pids: set[int] = set()
        self.start()

    def start(self, *overrides: str) -> None:
        """Start the command, or start it again."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.train", "--config", str(self._file), *overrides],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self._work,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )

    def lines(self) -> list[dict[str, Any]]:
        """`metrics.jsonl` so far, without a torn last line."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def done(self) -> int:
        """The last step that was written down."""
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    def observe(self) -> list[psutil.Process]:
        """Processes of the run; remembers them."""
        found = trees([self.process.pid])
        self.pids |= {process.pid for process in found}
        return found

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for `ready()`, or raise `Lost` when the command ends before or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            self.observe()
            if self.process.poll() is not None:
                raise Lost(f"{what}: the command ended with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Lost(f"{what}: not after {PATIENCE_S:g} s\n{self.tail()}")
            time.sleep(0.2)

    def tail(self) -> str:
        """The last lines of what the command said."""
        return "\n".join((self._work / "chaos.log").read_text(errors="replace").splitlines()[-25:])

    def find(self, victim: str) -> int | None:
        """Pid of a victim; None while there is none."""
        if victim == "driver":
            return self.process.pid
        names = {
            "policy": "ray::policy-0",
            "reward": "ray::reward-0",
            "engine": "ray::rollout-",
            "engine_core": "VLLM::",
        }
        return next((p.pid for p in self.observe() if title(p.pid).startswith(names[victim])), None)

    def left(self) -> list[int]:
        """Processes of the run that are still there after the time in which all have to be gone."""
        deadline = time.monotonic() + LEFT_S
        while (left := [pid for pid in self.pids if running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left


def title(pid: int) -> str:
    """The title of a process, as `ps` shows it: Ray puts the method in it that an actor is computing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def running(pid: int) -> bool:
    """Whether the process lives; a zombie doesn't."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def configuration(folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """Short steps with everything in them: two engines, checkpoints after each, restarts without end."""
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {
        "run": {"name": "chaos", "dir": str(folder / "runs"), "steps": 1_000_000, "seed": seed, "if_exists": "resume"},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "prompts": {"source": "reasoning_gym", "task": "chain_sum", "size": 200, "options": task},
            "chat_template": False,
            "max_prompt_tokens": 128,
        },
        "rollout": {
            "engines": 2,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 48,
            "kv_cache_bytes": 1 << 26,
            "deadline_s": 120,
        },
        "policy": {"learning_rate": 1e-3, "max_tokens_per_microbatch": 1024},
        "reward": {"functions": [{"name": f"{Path(__file__).resolve()}:length"}]},
        "checkpoint": {"every": 1},
        "fault_tolerance": {"max_restarts": 1000},
    }


def wait_for(run: Run, phase: str, dice: random.Random) -> bool:
    """Return in the middle of the phase; False when it did not come by."""
    checkpoints = run.folder / "checkpoints"
    policy = run.find("policy")
    deadline = time.monotonic() + 60.0
    before = run.done()
    if phase == "rollout":
        run.until(lambda: run.done() > before, "a step")
        time.sleep(dice.uniform(0.0, 0.4))
        return True

    def here() -> bool:
        if phase == "writing":
            return any(checkpoints.glob(".writing-*/policy/*"))
        if phase == "renamed":
            newest = max((p.name for p in checkpoints.glob("step-*")), default="")
            return newest != "" and newest != (checkpoints / "latest").read_text().strip()
        method = {"bucket": "send_weights", "update": "update"}[phase]
        return policy is not None and title(policy).endswith(f".{method}")

    while time.monotonic() < deadline and run.process.poll() is None:
        try:
            if here():
                return True
        except OSError:
            continue  # a folder went while it was looked at
        time.sleep(0.0005)
    return False


def strike(run: Run, kill: Kill, dice: random.Random) -> bool:
    """Kill the victim in its phase and see the run complete another step; False when the moment did not come."""
    if run.find(kill.victim) is None or not wait_for(run, kill.phase, dice):
        return False
    pid = run.find(kill.victim)
    if pid is None:
        return False
    run.observe()
    os.kill(pid, signal.SIGKILL)
    before = run.done()
    if kill.victim == "driver":
        run.process.wait(LEFT_S)
        left = run.left()
        if left:
            raise Lost(f"{len(left)} processes are left of a killed driver: {[title(p) for p in left][:5]}")
        run.start()
    run.until(lambda: run.done() > before, f"a step after killing {kill.victim} in phase {kill.phase}")
    return True


def finish(run: Run) -> None:
    """Let the run come to its end, with two more steps."""
    run.process.send_signal(signal.SIGINT)
    run.process.wait(LEFT_S)
    if run.left():
        raise Lost("processes are left after Ctrl-C")
    run.start(f"run.steps={run.done() + 2}")
    run.process.wait(PATIENCE_S)
    if run.process.returncode != 0:
        raise Lost(f"the run ended with {run.process.returncode}\n{run.tail()}")


def check(run: Run) -> dict[str, float]:
    """Every promise about what is left behind; returns the last step's metrics."""
    lines = run.lines()
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        raise Lost(f"metrics.jsonl has the steps {steps}")
    terms = ("trained", "filtered", "failed", "stale", "discarded", "buffered", "in_flight")
    for line in lines:
        drawn, accounted = line["ledger/drawn"], sum(line[f"ledger/{term}"] for term in terms)
        if drawn != accounted or drawn != line["step"] * PROMPTS * SAMPLES:
            raise Lost(f"step {line['step']}: {drawn} samples drawn, {accounted} accounted for")
    for step in steps:
        rows = pq.read_metadata(run.folder / "trajectories" / f"step-{step:06d}.parquet").num_rows
        if rows != PROMPTS * SAMPLES:
            raise Lost(f"step {step} has {rows} trajectories")
    store = CheckpointStore(run.folder / "checkpoints", keep=2)
    latest = store.latest()
    if latest is None or latest.step != steps[-1]:
        raise Lost(f"the latest checkpoint is {latest}, and the last step {steps[-1]}")
    store.verify(latest)
    if run.left():
        raise Lost(f"processes are left: {[title(pid) for pid in run.left()][:5]}")
    return lines[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills and of the run (default 1)")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="model folder")
    parser.add_argument("--folder", type=Path, help="where the run goes (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    arguments = parser.parse_args(argv)
    dice = random.Random(arguments.seed)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="rlhf-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    covered: Counter[str] = Counter()
    run, broken, last = Run(folder, arguments.model.resolve(), arguments.seed), "", {}
    try:
        run.until(lambda: run.done() >= 2, "the first steps")
        order = [kill for _ in range(arguments.kills) for kill in dice.sample(KILLS, len(KILLS))]
        for kill in order:
            if covered.total() == arguments.kills:
                break
            if strike(run, kill, dice):
                covered[f"{kill.phase}: {kill.victim}"] += 1
                console.print(f"{covered.total()}/{arguments.kills}  {kill.victim} in phase {kill.phase}: recovered")
        finish(run)
        last = check(run)
    except (Lost, CheckpointError, subprocess.TimeoutExpired, OSError, KeyError) as error:
        broken = f"{type(error).__name__}: {error}"
        run.process.kill()
    report(covered, broken, last, arguments)
    if not broken and not arguments.keep and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"the run's folder: {folder}")
    return 1 if broken or covered.total() < arguments.kills else 0


def report(covered: Counter[str], broken: str, last: dict[str, float], arguments: argparse.Namespace) -> None:
    """Print which phases were covered, and the JSON object as the last line."""
    table = Table("phase: victim", "kills")
    for name, count in sorted(covered.items()):
        table.add_row(name, str(count))
    console.print(table)
    console.print(f"[red]broken: {broken}[/red]" if broken else "every promise held")
    figures = {
        "script": "chaos",
        "kills": covered.total(),
        "seed": arguments.seed,
        "covered": dict(covered),
        "phases": sorted({name.partition(":")[0] for name in covered}),
        "steps": last.get("step"),
        "redone": last.get("ledger/redone"),
        "engines_lost": last.get("fleet/lost"),
        "broken": broken,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    sys.exit(main())
