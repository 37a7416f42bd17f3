"""Problems of the `reasoning-gym` package, the same for the same seed in every process.

Some of its tasks walk over sets, so that their problems change with Python's hash seed, which is random for each
process. They are therefore generated in a short-lived process with a fixed one: this module, run as a program.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rlhf.config.schema import ReasoningGymPrompts
from rlhf.data.errors import DataError

# Generation is a matter of seconds; a few tasks search for puzzles and take minutes for thousands.
_DEADLINE_S = 1800


def generate(source: ReasoningGymPrompts) -> list[dict[str, Any]]:
    """The package's entries, in order; raises `DataError` for a task or options that it doesn't have or refuses."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.data.problems"],
            input=source.model_dump_json().encode(),
            capture_output=True,
            timeout=_DEADLINE_S,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f"prompts.size: reasoning-gym did not finish {source.size} problems of {source.task!r} in {_DEADLINE_S} s; "
            "ask for fewer"
        ) from None
    if done.returncode != 0:
        log = done.stderr.decode(errors="replace").strip()[-2000:]
        raise DataError(f"prompts.task: generating {source.task!r} failed with exit code {done.returncode}:\n{log}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise DataError(answer)
    entries: list[dict[str, Any]] = answer
    return entries


def main() -> None:
    """Read a source from standard input, write its pickled entries, or what is wrong with it, to standard output."""
    # What a task prints must not end up among the entries.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    source = ReasoningGymPrompts.model_validate(json.loads(sys.stdin.buffer.read()))
    try:
        answer: list[dict[str, Any]] | str = _generate_here(source)
    except DataError as error:
        answer = str(error)
    with out:
        pickle.dump(answer, out)


def _generate_here(source: ReasoningGymPrompts) -> list[dict[str, Any]]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.task not in DATASETS:
        near = get_close_matches(source.task, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as 'chain_sum'"
        raise DataError(f"prompts.task: reasoning-gym has no task {source.task!r}; {hint}")
    valid = [f.name for f in fields(DATASETS[source.task][1]) if f.name not in ("seed", "size")]
    for name in source.options:
        if name not in valid:
            near = get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(valid)}"
            raise DataError(f"prompts.options.{name}: task {source.task!r} has no such option; {hint}")
    try:
        dataset = create_dataset(source.task, seed=source.seed, size=source.size, **source.options)
    except Exception as error:  # the tasks check their options with assertions and errors of many kinds
        raise DataError(f"prompts.options: task {source.task!r} refuses {source.options}: {error}") from error
    return [dataset[index] for index in range(source.size)]


if __name__ == "__main__":
    main()
