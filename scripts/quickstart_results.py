"""Turn the run folders of the quickstart into the results table of the README.

    python scripts/quickstart_results.py runs/seed1 runs/seed2 runs/seed3 runs/control --write README.md

Each folder gives one row, from its `config.yaml`, `metrics.jsonl` and `evaluations.jsonl`. A run with learning rate 0
is the control. Without --write the table is only printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WINDOW = 5  # steps that "first" and "last" average over
BEGIN, END = "<!-- quickstart-results -->", "<!-- /quickstart-results -->"


class ResultsError(Exception):
    """A run folder or the README does not hold what the table needs."""


@dataclass(frozen=True)
class Row:
    """One run: rewards are means per sample, `before` and `after` shares of the held-out `problems` answered right,
    `seconds_per_step` is a median.
    """

    seed: int
    learning_rate: float
    steps: int
    first: float
    last: float
    before: float
    after: float
    problems: int
    seconds_per_step: float


def main(argv: list[str] | None = None) -> int:
    """Print the table, and with --write put it into the README; return 1 when something is missing."""
    parser = argparse.ArgumentParser(description="Make the README's results table from run folders.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, one row each")
    parser.add_argument("--write", type=Path, metavar="README", help="file whose marked section is replaced")
    arguments = parser.parse_args(argv)
    try:
        table = render([read_run(folder) for folder in arguments.runs])
        print(table)
        if arguments.write:
            text = arguments.write.read_text(encoding="utf-8")
            arguments.write.write_text(insert(text, table, str(arguments.write)), encoding="utf-8")
    except ResultsError as error:
        print(f"quickstart_results: {error}", file=sys.stderr)
        return 1
    return 0


def read_run(folder: Path) -> Row:
    """Read one finished run folder."""
    config = yaml.safe_load(_text(folder / "config.yaml"))
    metrics = _json_lines(folder / "metrics.jsonl")
    evaluations = _json_lines(folder / "evaluations.jsonl")
    if len(metrics) < 2 * WINDOW:
        raise ResultsError(f"{folder / 'metrics.jsonl'} has {len(metrics)} steps; the table needs {2 * WINDOW} or more")
    if len(evaluations) < 2:
        raise ResultsError(
            f"{folder / 'evaluations.jsonl'} has {len(evaluations)} evaluations; "
            "the table needs one before and one after training: set `evaluation` and let the run finish"
        )
    metrics.sort(key=lambda line: line["step"])
    evaluations.sort(key=lambda line: line["step"])
    rewards = [line["reward/mean"] for line in metrics]
    return Row(
        seed=config["run"]["seed"],
        learning_rate=config["policy"]["learning_rate"],
        steps=len(metrics),
        first=statistics.fmean(rewards[:WINDOW]),
        last=statistics.fmean(rewards[-WINDOW:]),
        before=evaluations[0]["eval/accuracy"],
        after=evaluations[-1]["eval/accuracy"],
        problems=int(evaluations[-1]["eval/problems"]),
        seconds_per_step=statistics.median(line["time/step"] for line in metrics),
    )


def render(rows: list[Row]) -> str:
    """Return the Markdown table: trained runs by seed, then controls."""
    lines = [
        f"| run | mean reward, first {WINDOW} steps | last {WINDOW} steps | gain | held-out accuracy before | after "
        "| median step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row.learning_rate == 0, row.seed)):
        name = f"seed {row.seed}" + (", learning rate 0 (control)" if row.learning_rate == 0 else "")
        lines.append(
            f"| {name} | {row.first:.3f} | {row.last:.3f} | {row.last - row.first:+.3f} | {row.before:.1%} "
            f"| {row.after:.1%} | {row.seconds_per_step:.1f} s |"
        )
    steps = sorted({row.steps for row in rows})
    problems = sorted({row.problems for row in rows})
    lines += [
        "",
        f"{_either(steps)} steps; held-out reward is greedy, on {_either(problems)} problems never trained on.",
    ]
    return "\n".join(lines)


def insert(text: str, table: str, name: str) -> str:
    """Return `text` with what stands between the two markers replaced by the table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ResultsError(f"{name} lacks the markers {BEGIN} and {END}, between which the table goes")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{file} can't be read: {error.strerror}. Is this the folder of a run?") from error


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(file).splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
