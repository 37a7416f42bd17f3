"""Check that interrupted equals uninterrupted, bit for bit, in every set-up and for every state.

    python scripts/exactness.py                          # all of it; takes long
    python scripts/exactness.py --setups engines zero3
    python scripts/exactness.py --setups grpo --no-states

Each set-up is trained twice for six steps with `run.deterministic`: at once, and killed with SIGKILL after the
checkpoint of step 3 and resumed. Every sample, metric of learning, final weight and the driver's and learners' state
after step 6 have to be the same, and no gradient may be zero. With `grpo` and `ppo` the comparison has to find the
difference in a run with another seed, and in runs that are resumed without one of the states that a checkpoint holds.

A table says what was compared; the JSON object is the last line. Exit code 0 only if all of that held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from observed_run import COMMAND, ROOT, Broken, ObservedRun, configuration
from rich.console import Console
from rich.table import Table

STEPS, CUT = 6, 3
PROMPTS = 3
# Of a step's metrics: what learning is made of, and not how long it took.
COMPARED = ("reward/", "ledger/", "rollout/length", "policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy")
COMPARED += ("policy/learning_rate", "critic/loss", "critic/grad_norm", "critic/explained_variance")
# Names of learners' states that a file of theirs holds: Adam's moments, and the random streams.
LEARNER_STATES = ("optimizer", "random")
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def base(model: Path, seed: int) -> dict[str, Any]:
    """GRPO on one rank: Adam's state, a decaying learning rate and clipping all have to come back."""
    config = configuration("run", model, seed, prompts=40)
    config["run"] |= {"steps": STEPS, "deterministic": True}
    config["rollout"] |= {"prompts_per_step": PROMPTS, "max_new_tokens": 12}
    config["policy"] = {
        "learning_rate": 1e-4,
        "schedule": "linear",
        "minibatches": 2,
        "max_tokens_per_microbatch": 512,
    }
    config["checkpoint"] = {"every": CUT}
    return config


def _ppo(config: dict[str, Any]) -> None:
    """PPO with a critic, both on two ranks, and KL whose coefficient follows a controller."""
    kl = {"where": "reward", "coefficient": 0.05, "controller": "adaptive", "target": 0.001, "horizon": 50}
    config["algorithm"] = {"advantage": "gae", "kl": kl}
    config["policy"]["ranks"] = 2
    config["critic"] = {"ranks": 2, "learning_rate": 1e-4, "warmup_batches": 1}


def _engines(config: dict[str, Any]) -> None:
    """Two engines, each with samples of its own."""
    config["rollout"]["engines"] = 2


def _epoch(config: dict[str, Any]) -> None:
    """An epoch that ends with the checkpoint."""
    config["data"]["prompts"]["size"] = PROMPTS * CUT


def _partial(config: dict[str, Any]) -> None:
    """Epochs that end in the middle of a batch, before and after the checkpoint."""
    config["data"]["prompts"]["size"] = PROMPTS + 2


def _zero3(config: dict[str, Any]) -> None:
    """ZeRO-3 on two ranks."""
    config["policy"] |= {"ranks": 2, "zero_stage": 3}


SETUPS: dict[str, Callable[[dict[str, Any]], None]] = {
    "grpo": lambda config: None,
    "ppo": _ppo,
    "engines": _engines,
    "epoch": _epoch,
    "partial": _partial,
    "zero3": _zero3,
}


def make(setup: str, model: Path, seed: int, work: Path) -> ObservedRun:
    """A run of the set-up, not started yet."""
    config = base(model, seed)
    SETUPS[setup](config)
    return ObservedRun(config, work)


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two run folders, named; empty where they are the same bit for bit."""
    return [*_metrics(one, other), *_samples(one, other), *_weights(one, other), *_states(one, other)]


def _metrics(one: Path, other: Path) -> Iterator[str]:
    lines, others = ([json.loads(t) for t in (f / "metrics.jsonl").read_text().splitlines()] for f in (one, other))
    if [line["step"] for line in lines] != [line["step"] for line in others]:
        yield f"steps {[line['step'] for line in lines]} and {[line['step'] for line in others]}"
    for line, again in zip(lines, others, strict=False):
        names = {name for name in line.keys() | again.keys() if name.startswith(COMPARED)} - {"ledger/redone"}
        for name in sorted(names):
            if line.get(name) != again.get(name):
                yield f"{name} of step {line['step']}: {line.get(name)!r} and {again.get(name)!r}"


def _samples(one: Path, other: Path) -> Iterator[str]:
    for step in range(1, STEPS + 1):
        name = f"step-{step:06d}.parquet"
        # As text, in which NaN equals NaN.
        rows, again = (
            [repr(row) for row in pq.read_table(f / "trajectories" / name).to_pylist()] for f in (one, other)
        )
        if rows != again:
            different = sum(a != b for a, b in zip(rows, again, strict=False)) + abs(len(rows) - len(again))
            yield f"{different} samples of step {step}"


def _weights(one: Path, other: Path) -> Iterator[str]:
    import torch
    from safetensors.torch import load_file

    weights, again = (load_file(folder / "export" / "model.safetensors") for folder in (one, other))
    different = [name for name in weights.keys() | again.keys() if not torch.equal(weights[name], again[name])]
    if different:
        yield f"{len(different)} of {len(weights)} weights"


def _states(one: Path, other: Path) -> Iterator[str]:
    """The states in the last checkpoint, but for what a rewind is counted by."""
    folder = Path("checkpoints") / f"step-{STEPS:06d}"
    files = sorted(p.relative_to(one) for p in (one / folder).rglob("*.json") if p.name != "manifest.json")
    for file in files:
        state, again = (json.loads((f / file).read_text()) for f in (one, other))
        for found in (state, again):
            found.get("ledger", {}).pop("redone", None)
        yield from (f"{file.relative_to(folder)}: {key}" for key in state if state[key] != again.get(key))


def train_without(state: str, arguments: Sequence[str]) -> int:
    """The training command, but a resume leaves the driver's `state` as a new run has it.

    Says so in a file in the working folder where that makes no difference, since nothing has changed it.
    """
    from rlhf.checkpoint import StateRegistry
    from rlhf.train import main as train

    load = StateRegistry.load

    def load_all_but_one(registry: StateRegistry, path: Path) -> None:
        kept = registry._objects.pop(state)
        full = json.loads(path.read_text())
        if full[state] == json.loads(json.dumps(kept.state_dict())):
            Path("unchanged").touch()
        partial = path.with_name("partial.json")
        partial.write_text(json.dumps({name: value for name, value in full.items() if name != state}))
        load(registry, partial)
        partial.unlink()
        registry._objects[state] = kept

    StateRegistry.load = load_all_but_one  # type: ignore[method-assign]
    return train(arguments)


def tamper(checkpoint: Path, role: str, state: str) -> None:
    """Replace a state of the learner in the checkpoint by that of a new process, under a manifest that agrees."""
    import torch

    from rlhf.checkpoint.files import seal
    from rlhf.checkpoint.manifest import MANIFEST, parse, render

    if state == "random":
        for file in (checkpoint / role).glob("rank-*.json"):
            streams = json.loads(file.read_text())
            streams["python"][1][0] ^= 1
            file.write_text(json.dumps(streams))
    else:
        for file in (checkpoint / role / "shards").glob("*optim_states.pt"):
            shard = torch.load(file, weights_only=False)
            zero_moments(shard)
            torch.save(shard, file)
    described = parse(checkpoint, (checkpoint / MANIFEST).read_bytes())
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).write_bytes(render(replace(described, files=seal(checkpoint))))


def zero_moments(value: Any) -> None:
    """Set Adam's moments to 0, wherever DeepSpeed keeps them in a shard."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("exp_avg", "exp_avg_sq"):
                item.zero_()
            else:
                zero_moments(item)
    elif isinstance(value, list | tuple):
        for item in value:
            zero_moments(item)


class Case:
    """One set-up: the run at once, the run that is cut, and runs that have to differ.

    `command` is what starts the first two, where it is not the training command itself.
    """

    def __init__(self, setup: str, model: Path, seed: int, work: Path, command: Sequence[str] = COMMAND) -> None:
        self._setup, self._model, self._seed, self._work = setup, model, seed, work / setup
        self._command = command
        self.whole, self.cut = self._run("whole"), self._run("cut")

    def _run(self, name: str, seed: int | None = None) -> ObservedRun:
        return make(self._setup, self._model, self._seed if seed is None else seed, self._work / name)

    def interrupted(self) -> list[str]:
        """What differs after a kill and a resume; keeps the folder as it was at the kill."""
        self.whole.start(command=self._command)
        self.whole.finish()
        flat = [line["step"] for line in self.whole.lines() if not line["policy/grad_norm"] > 0]
        if flat:
            raise Broken(f"{self._setup}: the gradient is zero in the steps {flat}, which nothing could differ in")
        cut = self.cut
        cut.start(command=self._command)
        cut.until(lambda: cut.saved() == CUT, f"the checkpoint of step {CUT}")
        os.kill(cut.process.pid, signal.SIGKILL)
        cut.process.wait()
        if left := cut.left():
            raise Broken(f"{self._setup}: processes are left of a killed driver: {left[:5]}")
        shutil.copytree(cut.folder, self._work / "at_the_kill")
        cut.start("run.if_exists=resume", command=self._command)
        cut.finish()
        return differences(self.whole.folder, cut.folder)

    def other_seed(self) -> list[str]:
        """What differs in a run with another seed."""
        other = self._run("seed", self._seed + 1)
        other.start()
        other.finish()
        return differences(self.whole.folder, other.folder)

    def states(self) -> list[str]:
        """The names of all states in the checkpoint, the learners' as `role/state`."""
        checkpoint = self._checkpoint(self._work / "at_the_kill")
        driver = json.loads((checkpoint / "driver.json").read_text())
        roles = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
        return [*driver, *(f"{role}/{state}" for role in roles for state in LEARNER_STATES)]

    def without(self, state: str) -> list[str] | None:
        """What differs when the run is resumed without this state; None where it is as in a new run."""
        run = self._run(f"without-{state.replace('/', '-')}")
        shutil.copytree(self._work / "at_the_kill", run.folder)
        role, _, part = state.partition("/")
        if part:
            tamper(self._checkpoint(run.folder), role, part)
            run.start("run.if_exists=resume")
        else:
            run.start("run.if_exists=resume", command=(__file__, "--train-without", state))
        try:
            run.finish()
        except Broken as error:
            return [f"the run fails: {str(error).splitlines()[0]}"]
        if (run.folder.parents[1] / "unchanged").exists():
            return None
        return differences(self.whole.folder, run.folder)

    @staticmethod
    def _checkpoint(folder: Path) -> Path:
        return folder / "checkpoints" / f"step-{CUT:06d}"


def check(case: Case, setup: str, with_states: bool) -> Iterator[tuple[str, bool, str]]:
    """Each comparison of a set-up: its name, whether it came out as it has to, and what it found."""
    found = case.interrupted()
    yield f"{setup}: killed and resumed", not found, "; ".join(found[:3]) or "the same, bit for bit"
    if not with_states:
        return
    found = case.other_seed()
    yield f"{setup}: another seed", bool(found), f"{len(found)} differences"
    for state in case.states():
        lost = case.without(state)
        said = "as in a new run: nothing to lose" if lost is None else f"{len(lost)} differences, {'; '.join(lost[:1])}"
        yield f"{setup}: without {state}", lost is None or bool(lost), said


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons; return 1 when one did not come out as it has to."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["--train-without"]:
        return train_without(arguments[1], arguments[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS), help="default: all")
    parser.add_argument("--no-states", action="store_true", help="leave the runs out that have to differ")
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs (default 1)")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="model folder")
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay (default: a temporary folder)")
    chosen = parser.parse_args(arguments)
    work = (chosen.folder or Path(tempfile.mkdtemp(prefix="rlhf-exactness-"))).resolve()
    table, broken = Table("comparison", "", "found"), list[str]()
    for setup in chosen.setups:
        with_states = not chosen.no_states and setup in ("grpo", "ppo")
        try:
            case = Case(setup, chosen.model.resolve(), chosen.seed, work)
            for name, held, said in check(case, setup, with_states):
                table.add_row(name, "ok" if held else "[red]BROKEN[/red]", said)
                console.print(f"{name}: {'ok' if held else 'BROKEN'}, {said}", markup=False)
                broken += [] if held else [name]
        except Broken as error:
            broken.append(f"{setup}: {error}")
            console.print(f"{setup}: {error}", markup=False)
    console.print(table)
    figures = {"script": "exactness", "setups": chosen.setups, "comparisons": table.row_count, "broken": broken}
    if chosen.folder is None and not broken:
        shutil.rmtree(work, ignore_errors=True)
    sys.stdout.write(json.dumps(figures) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
