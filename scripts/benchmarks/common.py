"""What the benchmarks share: what they ran on, child processes with a deadline, and how results are shown."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from rlhf.cluster.ports import free_port

Found = TypeVar("Found")

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MODEL = ROOT / "models" / "smollm2-135m-instruct"
# What makes matrix products in bfloat16 fast on a CPU: times on machines with and without it don't compare.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
# Runnable processes (one minute's mean) below which a machine counts as quiet.
_QUIET_LOAD = 0.5
_OUTPUT_LINES = 25
_END_S = 90.0

# A benchmark's output goes into files as often as to a terminal; there rich would fall back to 80 columns.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class BenchmarkError(Exception):
    """A side of the benchmark failed; the message says which, and the last lines of what it said."""


def threads() -> int:
    """Threads that each side may use: the cores of this process."""
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    """The environment of both sides: offline, quiet, and with the same number of threads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads()),
        "MKL_NUM_THREADS": str(threads()),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def machine() -> dict[str, Any]:
    """The machine, and how busy it is at this moment: ask before the first side starts."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cores": threads(),
        "bfloat16": [flag for flag in _BFLOAT16_FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of `packages`, those that are not installed left out."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def say_machine(where: Mapping[str, Any]) -> None:
    """Say what the figures are from, and that they are worth nothing if something else is running."""
    special = ", ".join(where["bfloat16"]) or "no bfloat16 instructions"
    memory = where["memory_bytes"] / 2**30
    console.print(f"{where['cpu']}, {where['cores']} cores ({special}), {memory:.0f} GiB, {where['system']}")
    if where["load_before"] > _QUIET_LOAD:
        console.print(
            f"[yellow]The machine is not quiet: the load is {where['load_before']:.1f}. The ratios don't hold then "
            "either: a side whose threads wait for each other often loses more.[/yellow]"
        )


def carry_out(
    name: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Found],
    report: Callable[[argparse.Namespace, Mapping[str, Any], Found], None],
) -> int:
    """Measure and report, or say why not; the exit code. `arguments.model` has to be a folder."""
    if not arguments.model.is_dir():
        print(f"{name}: no model at {arguments.model}: python scripts/prepare_model.py", file=sys.stderr)
        return 1
    where = machine()
    say_machine(where)
    try:
        found = measure(arguments)
    except BenchmarkError as error:
        print(f"\n{name}: {error}", file=sys.stderr)
        return 1
    report(arguments, where, found)
    return 0


def log_normal(mean: float, sigma: float, count: int, seed: int) -> Any:
    """Log-normal lengths with this mean, rounded, an array of floats: cut them to what is possible."""
    # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
    mu = math.log(mean) - sigma**2 / 2
    return np.random.default_rng(seed).lognormal(mu, sigma, count).round()


def run_child(command: Sequence[str], *, what: str, deadline_s: float) -> str:
    """Run a command in its own process and return its stdout; raises `BenchmarkError` with what it said last."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = child.communicate(timeout=deadline_s)
    except BaseException as error:
        out, err = _end(child)
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchmarkError(f"{what}: not done after {deadline_s:g} s\n{_last_lines(out + err)}") from error
        raise
    if child.returncode != 0:
        raise BenchmarkError(f"{what}: exit code {child.returncode}\n{_last_lines(out + err)}")
    return out


def _end(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Ask the child to end, which lets it end its own children; returns what it said."""
    child.terminate()
    try:
        return child.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


def _last_lines(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-_OUTPUT_LINES:])


def last_json(output: str, *, what: str) -> dict[str, Any]:
    """The JSON object in the last line of a benchmark's output."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise BenchmarkError(f"{what}: its last line is not JSON\n{_last_lines(output)}") from error
    if not isinstance(result, dict):
        raise BenchmarkError(f"{what}: its last line is not a JSON object\n{_last_lines(output)}")
    return result


def run_ranks(command: Sequence[str], ranks: int, *, what: str, deadline_s: float) -> list[dict[str, Any]]:
    """Run a command in `ranks` processes at once, each with its `--rank` and the `--port` they meet at; their JSON."""
    port = free_port()

    def one(rank: int) -> dict[str, Any]:
        name = f"{what}, rank {rank}" if ranks > 1 else what
        place = ["--rank", str(rank), "--port", str(port)]
        return last_json(run_child([*command, *place], what=name, deadline_s=deadline_s), what=name)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people; all columns but the first are numbers. Cells may be in bold as in Markdown."""
    console.print(f"\n{title}")
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in row))
    console.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as Markdown."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def finish(figures: Mapping[str, Any], tables: Sequence[str]) -> None:
    """Print what goes into docs/performance.md, and the JSON object as the last line."""
    print("\nFor docs/performance.md:\n")
    print("\n\n".join(tables))
    print()
    print(json.dumps(figures), flush=True)
