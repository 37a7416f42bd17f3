"""Useful tokens per second of a policy learner, against a bare PyTorch loop and the machine's matrix rate.

    bash scripts/setup_env.sh
    python scripts/benchmarks/learner.py --rounds 2
    python scripts/benchmarks/learner.py --dtype float32 --workloads groups --stages 2 --ranks 1

Every side makes the same update: forward and backward over the same samples, with the same cap on a micro-batch, and
one AdamW step on float32 masters. Useful tokens are all responses, and each group's prompt once, whatever a side
computes. Two workloads of as many samples, each with response lengths that are constant and log-normal:

- `groups`  8 prompts with 8 samples each, against the loop on padded rectangles, as a textbook has it and at its best
            (`ratio_vs_plain`, `ratio_vs_padded`; see `bare_loop.py`);
- `alone`   every sample has its own prompt, against the loop on perfectly packed rows: `ratio_vs_packed_zero2` and
            `ratio_vs_packed_zero3`. The loop attends in two ways, and the faster one counts.

The learner is a real `PolicyLearner` under ZeRO 2 and 3, with 1 and 2 ranks that share the cores; the loop is one
process on all cores. A run is one side on one workload in processes of its own: a warm-up, then `--updates` timed ones.
Sides alternate in each round, and figures are medians over all timed updates. The norm of the first gradient has to be
the same for all sides of a workload, or they don't do the same work.

`mfu` is the rate of the operations that useful tokens need, by `rlhf.models.operations`, over what the side's processes
reach in large matrix products in its dtype, without the optimizer step and with it. The learner's own metrics stand
beside this script's clock: `clock_over_reported` is seconds of an update here over those that its metrics are of.

A loop in which every sample has its own prompt needs more operations, padding or not: `own_prompts` times as many. That
is what its ratio would be if both sides computed equally fast.

The last line has the lowest of each ratio over lengths, stages and ranks, and every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    ROOT,
    BenchmarkError,
    carry_out,
    console,
    finish,
    markdown,
    run_ranks,
    show,
    threads,
    versions,
)
from learner_side import Job, Lengths, Workload, make_samples

from rlhf.batching.plan import unique_tokens
from rlhf.cluster.model_shape import ModelShape

BARE: dict[Workload, tuple[str, ...]] = {"groups": ("plain", "padded"), "alone": ("mask", "split")}
WANTED = {"ratio_vs_padded": 3.0, "ratio_vs_packed_zero2": 0.9, "ratio_vs_packed_zero3": 0.8, "mfu": 0.5}
# Relative difference of the first gradient's norm. In bfloat16 the loop adds gradients up in bfloat16.
SAME_NORM = 0.05
DEADLINE_S = 3600.0
SCRIPT = ROOT / "scripts" / "benchmarks" / "learner_side.py"
PACKAGES = ("rlhf", "torch", "transformers", "deepspeed")

Found = Mapping[tuple[Workload, Lengths], Mapping[str, dict[str, Any]]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workloads", nargs="+", choices=tuple(BARE), default=list(BARE))
    parser.add_argument("--lengths", nargs="+", choices=("constant", "log-normal"), default=["constant", "log-normal"])
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[2, 3], help="ZeRO stages")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="ranks of the learner")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side on each workload")
    parser.add_argument("--updates", type=int, default=3, help="timed updates of each run")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=46)
    parser.add_argument("--response-tokens", type=int, default=19, help="the mean")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the log-normal lengths")
    parser.add_argument("--max-tokens", type=int, default=2048, help="cap on a micro-batch")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    if min(arguments.rounds, arguments.updates) < 1:
        parser.error("--rounds and --updates must be at least 1")
    arguments.model = arguments.model.resolve()
    return arguments


def run(job: Job) -> dict[str, Any]:
    """One run of a side, in processes of its own: what rank 0 found, the rate of all ranks, and the slowest passes."""
    command = [sys.executable, str(SCRIPT), "--job", json.dumps(asdict(job))]
    what = f"{job.side} on {job.workload}, {job.lengths}"
    found = run_ranks(command, job.ranks, what=what, deadline_s=DEADLINE_S)
    rate = sum(of_rank["matrix_rate"] for of_rank in found)
    passes = [max(update) for update in zip(*(of_rank["passes"] for of_rank in found), strict=True)]
    return found[0] | {"matrix_rate": rate, "passes": passes}


def summarise(runs: Sequence[Mapping[str, Any]], useful: int) -> dict[str, Any]:
    """A side's figures on a workload with so many useful tokens: medians over the updates of all its runs."""
    seconds = statistics.median(s for r in runs for s in r["seconds"])
    passes = statistics.median(s for r in runs for s in r["passes"])
    possible = statistics.median(r["matrix_rate"] for r in runs)
    operations = runs[0]["operations"]
    figures = {
        "useful_tokens_per_second": useful / seconds,
        "seconds": seconds,
        "forward_backward": passes,
        "mfu": operations / passes / possible,
        "mfu_with_optimizer": operations / seconds / possible,
        "matrix_rate": possible,
        **{name: runs[0][name] for name in ("attention", "threads", "grad_norm")},
    }
    if "operations_own_prompts" in runs[0]:
        figures["own_prompts"] = runs[0]["operations_own_prompts"] / operations
    if "reported" in runs[0]:
        reported = {name: statistics.median(r["reported"][name] for r in runs) for name in runs[0]["reported"]}
        figures["reported"] = reported
        clocks = [zip(r["seconds"], r["reported_seconds"], strict=True) for r in runs]
        figures["clock_over_reported"] = statistics.median(own / theirs for run in clocks for own, theirs in run)
    return figures


def with_ratios(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sides of a workload, each with its tokens per second over those of every bare loop, and of the fastest."""
    bare = {side: f["useful_tokens_per_second"] for side, f in rows.items() if side.startswith("bare")}

    def ratios(rate: float) -> dict[str, Any]:
        over = {side: rate / of_bare for side, of_bare in bare.items()}
        return {"over": over, "over_fastest": min(over.values())}

    return {side: f | ratios(f["useful_tokens_per_second"]) for side, f in rows.items()}


def check_same_work(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `BenchmarkError` when the sides of a workload had different gradients."""
    norms = {side: figures["grad_norm"] for side, figures in rows.items()}
    if max(norms.values()) > (1 + SAME_NORM) * min(norms.values()):
        raise BenchmarkError(f"the sides don't do the same work: the norms of their first gradients are {norms}")


def headlines(found: Found) -> dict[str, float]:
    """The lowest of each ratio; those that nothing was measured for are absent."""
    ours = [(w, s, f) for (w, _), rows in found.items() for s, f in rows.items() if not s.startswith("bare")]
    columns = {
        "ratio_vs_plain": [f["over"]["bare, plain"] for w, _, f in ours if w == "groups"],
        "ratio_vs_padded": [f["over"]["bare, padded"] for w, _, f in ours if w == "groups"],
        "ratio_vs_packed_zero2": [f["over_fastest"] for w, s, f in ours if w == "alone" and s.startswith("ZeRO 2")],
        "ratio_vs_packed_zero3": [f["over_fastest"] for w, s, f in ours if w == "alone" and s.startswith("ZeRO 3")],
        "mfu": [f["mfu"] for _, _, f in ours],
        "mfu_with_optimizer": [f["mfu_with_optimizer"] for _, _, f in ours],
    }
    return {name: min(values) for name, values in columns.items() if values}


def jobs(arguments: argparse.Namespace, workload: Workload, lengths: Lengths) -> list[Job]:
    """The sides of a workload, the bare loops first."""
    names = (
        "dtype",
        "prompts",
        "samples",
        "prompt_tokens",
        "response_tokens",
        "sigma",
        "max_tokens",
        "updates",
        "seed",
    )
    settings = {name: getattr(arguments, name) for name in names}
    settings |= {"model": str(arguments.model), "workload": workload, "lengths": lengths}
    bare = [Job(layout=layout, stage=0, ranks=1, **settings) for layout in BARE[workload]]
    ours = [(stage, ranks) for stage in arguments.stages for ranks in arguments.ranks]
    return bare + [Job(layout=None, stage=stage, ranks=ranks, **settings) for stage, ranks in ours]


def measure(arguments: argparse.Namespace) -> dict[tuple[Workload, Lengths], dict[str, dict[str, Any]]]:
    """All runs of all rounds, one after the other."""
    every = [job for w in arguments.workloads for lengths in arguments.lengths for job in jobs(arguments, w, lengths)]
    runs: dict[Job, list[dict[str, Any]]] = {job: [] for job in every}
    for number in range(1, arguments.rounds + 1):
        for job in every:
            console.print(f"round {number}: {job.workload}, {job.lengths}, {job.side} … ", end="")
            runs[job].append(run(job))
            console.print(f"{statistics.median(runs[job][-1]['seconds']):.2f} s an update")
    vocabulary = ModelShape.from_path(arguments.model).vocab
    found: dict[tuple[Workload, Lengths], dict[str, dict[str, Any]]] = {}
    for job, of_job in runs.items():
        useful = unique_tokens(sample.length for sample in make_samples(job, vocabulary))
        found.setdefault((job.workload, job.lengths), {})[job.side] = summarise(of_job, useful)
    for rows in found.values():
        check_same_work(rows)
    return {key: with_ratios(rows) for key, rows in found.items()}


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each side of a workload."""
    found = []
    for side, f in rows.items():
        reported = f.get("reported")
        wasted = "" if reported is None else f"{reported['padding_fraction'] + reported['duplicate_fraction']:.1%}"
        clock = "" if reported is None else f"{f['clock_over_reported']:.3f}"
        rate, mfu = f"{f['useful_tokens_per_second']:.0f}", [f"{f['mfu']:.3f}", f"{f['mfu_with_optimizer']:.3f}"]
        times = [f"{f['seconds']:.2f}", f"{f['forward_backward']:.2f}"]
        found.append([side, rate, f"{f['over_fastest']:.2f}", *times, *mfu, wasted, clock])
    return found


def report(arguments: argparse.Namespace, where: Mapping[str, Any], found: Found) -> None:
    """Print the tables, and the JSON object as the last line."""
    header = ["", "useful tokens/s", "/ fastest bare", "seconds", "passes", "MFU", "with optimizer", "wasted", "clock"]
    tables = []
    for (workload, lengths), rows in found.items():
        title = f"{workload}, {lengths} lengths, {arguments.dtype}"
        show(title, header, table(rows))
        for side, f in rows.items():
            more = f", {f['own_prompts']:.2f} times the operations without its padding" if "own_prompts" in f else ""
            console.print(f"  {side}: {f['attention']} attention, {f['threads']} threads a process{more}")
        tables.append(markdown([title, *header[1:]], table(rows)))
    lowest = headlines(found)
    summary = (["lowest of all rows", "measured", "wanted"], headline_rows(lowest))
    show("Against what is wanted", *summary)
    figures = {
        "benchmark": "learner",
        **lowest,
        "wanted": WANTED,
        "rows": [
            {"workload": workload, "lengths": lengths, "side": side, **f}
            for (workload, lengths), rows in found.items()
            for side, f in rows.items()
        ],
        **vars(arguments),
        "model": arguments.model.name,
        "threads": threads(),
        "machine": where,
        "versions": versions(*PACKAGES),
    }
    finish(figures, [*tables, markdown(*summary)])


def headline_rows(lowest: Mapping[str, float]) -> list[list[str]]:
    """What was measured beside what is wanted."""
    return [[name, f"{value:.2f}", str(WANTED.get(name, ""))] for name, value in lowest.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when a side fails."""
    return carry_out("learner", parse(argv), measure, report)


if __name__ == "__main__":
    sys.exit(main())
