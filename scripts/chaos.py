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
import itertools
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from observed_run import LEFT_S, PATIENCE_S, ROOT, Broken, ObservedRun, configuration, title
from rich.console import Console
from rich.table import Table

from rlhf.checkpoint import CheckpointError, CheckpointStore

PROMPTS, SAMPLES = 4, 4
# A moment may not come: so many kills are tried for each that is wanted.
TRIES = 10
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


# How the processes of the victims begin to call themselves.
TITLES = {
    "policy": "ray::policy-0",
    "reward": "ray::reward-0",
    "engine": "ray::rollout-",
    "engine_core": "VLLM::",
}


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and in which phase."""

    phase: str
    victim: str


# Which victims make sense in which phase.
VICTIMS = {
    "rollout": ("engine", "engine_core", "driver", "reward"),
    "bucket": ("policy", "engine", "driver"),
    "update": ("policy", "driver"),
    "writing": ("policy", "driver"),
    "renamed": ("driver",),
}


def plan(dice: random.Random) -> Iterator[Kill]:
    """Kills without end: each phase comes by once before one comes again, its victims in turn."""
    turns = {phase: itertools.cycle(dice.sample(victims, len(victims))) for phase, victims in VICTIMS.items()}
    while True:
        yield from (Kill(phase, next(turns[phase])) for phase in dice.sample(list(VICTIMS), len(VICTIMS)))


def find(run: ObservedRun, victim: str) -> int | None:
    """Pid of a victim; None while there is none."""
    if victim == "driver":
        return int(run.process.pid)
    return next((p.pid for p in run.observe() if title(p.pid).startswith(TITLES[victim])), None)


def make(model: Path, seed: int, folder: Path) -> ObservedRun:
    """Short steps with everything in them: two engines, checkpoints after each, restarts without end."""
    config = configuration("chaos", model, seed, prompts=200)
    config["run"] |= {"steps": 1_000_000, "if_exists": "resume"}
    config["rollout"] |= {"engines": 2, "prompts_per_step": PROMPTS, "max_new_tokens": 48, "deadline_s": 120}
    config["policy"] = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 1024}
    config["checkpoint"] = {"every": 1}
    config["fault_tolerance"] = {"max_restarts": 1000}
    return ObservedRun(config, folder)


def wait_for(run: ObservedRun, phase: str, dice: random.Random) -> bool:
    """Return in the middle of the phase; False when it did not come by."""
    checkpoints = run.folder / "checkpoints"
    policy = find(run, "policy")
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


def strike(run: ObservedRun, kill: Kill, dice: random.Random) -> bool:
    """Kill the victim in its phase and see the run complete another step; False when the moment did not come."""
    if find(run, kill.victim) is None or not wait_for(run, kill.phase, dice):
        return False
    pid = find(run, kill.victim)
    if pid is None:
        return False
    run.observe()
    os.kill(pid, signal.SIGKILL)
    before = run.done()
    if kill.victim == "driver":
        run.process.wait(LEFT_S)
        left = run.left()
        if left:
            raise Broken(f"{len(left)} processes are left of a killed driver: {left[:5]}")
        run.start()
    run.until(lambda: run.done() > before, f"a step after killing {kill.victim} in phase {kill.phase}")
    return True


def finish(run: ObservedRun) -> None:
    """Let the run come to its end, with two more steps."""
    # Not Ctrl-C, which what a shell started in the background ignores.
    run.process.terminate()
    run.process.wait(LEFT_S)
    if left := run.left():
        raise Broken(f"processes are left after SIGTERM: {left[:5]}")
    run.start(f"run.steps={run.done() + 2}")
    run.process.wait(PATIENCE_S)
    if run.process.returncode != 0:
        raise Broken(f"the run ended with {run.process.returncode}\n{run.tail()}")


def check(run: ObservedRun) -> dict[str, float]:
    """Every promise about what is left behind; returns the last step's metrics."""
    lines = run.lines()
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        raise Broken(f"metrics.jsonl has the steps {steps}")
    terms = ("trained", "filtered", "failed", "stale", "discarded", "buffered", "in_flight")
    for line in lines:
        drawn, accounted = line["ledger/drawn"], sum(line[f"ledger/{term}"] for term in terms)
        if drawn != accounted or drawn != line["step"] * PROMPTS * SAMPLES:
            raise Broken(f"step {line['step']}: {drawn} samples drawn, {accounted} accounted for")
    for step in steps:
        rows = pq.read_metadata(run.folder / "trajectories" / f"step-{step:06d}.parquet").num_rows
        if rows != PROMPTS * SAMPLES:
            raise Broken(f"step {step} has {rows} trajectories")
    store = CheckpointStore(run.folder / "checkpoints", keep=2)
    latest = store.latest()
    if latest is None or latest.step != steps[-1]:
        raise Broken(f"the latest checkpoint is {latest}, and the last step {steps[-1]}")
    store.verify(latest)
    if left := run.left():
        raise Broken(f"processes are left: {left[:5]}")
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
    run, broken, last = make(arguments.model.resolve(), arguments.seed, folder), "", {}
    run.start()
    try:
        run.until(lambda: run.done() >= 2, "the first steps")
        for kill in itertools.islice(plan(dice), TRIES * arguments.kills):
            if covered.total() == arguments.kills:
                break
            if strike(run, kill, dice):
                covered[f"{kill.phase}: {kill.victim}"] += 1
                console.print(f"{covered.total()}/{arguments.kills}  {kill.victim} in phase {kill.phase}: recovered")
        finish(run)
        last = check(run)
    except (Broken, CheckpointError, subprocess.TimeoutExpired, OSError, KeyError) as error:
        broken = f"{type(error).__name__}: {error}"
        run.process.kill()
    if not broken and not arguments.keep and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"the run's folder: {folder}")
    report(covered, broken, last, arguments)
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
