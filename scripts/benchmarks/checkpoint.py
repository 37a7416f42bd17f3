"""What a checkpoint of the policy costs the step, against writing as many bytes.

    bash scripts/setup_env.sh
    python scripts/benchmarks/checkpoint.py --rounds 5

A real policy learner (one rank) on the quickstart's model, with the state of its optimizer. A round measures, one after
the other:

- `wait`    what a step waits for the save, in `save` itself and before the next optimizer step, which may not change
            what is not copied yet. Between the two is `--generation` seconds of doing nothing, where a step generates;
- `at_once` the same without it: an update as short as can be follows immediately;
- `behind`  how long copying, writing and syncing take in the background;
- `bare`    a loop that writes files of the same sizes from memory, in pieces of the same size, each with fsync.

Medians over the rounds; `wait_over_bare` is what a step waits of the time that writing would take. The first save is
told apart: it has to get its memory from the system, which later ones use again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import MODEL, environment, finish, machine, markdown, say_machine, show, threads, versions

from rlhf.batching import LearnerSample
from rlhf.cluster.ports import free_port
from rlhf.config.schema import Config
from rlhf.learners.policy import PolicyLearner
from rlhf.learners.snapshot import WRITE_BYTES, WriteReport
from rlhf.trajectories import Columns


def bench_config(model: Path, dtype: str, zero_stage: int) -> Config:
    """A run of this model, of which only the policy is started."""
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"prompts": {"source": "jsonl", "path": "unused.jsonl"}, "max_prompt_tokens": 64},
            "rollout": {"max_new_tokens": 16, "samples_per_prompt": 2, "prompts_per_step": 1},
            "reward": {"functions": [{"name": "length"}]},
            "algorithm": {"correction": {"method": "none"}},
            "policy": {"zero_stage": zero_stage},
        }
    )


def samples() -> list[LearnerSample]:
    """Two short samples: what an update needs to move every weight."""
    found = []
    for index, advantage in enumerate((1.0, -1.0)):
        columns = Columns.from_completion((5, 6, 7), [8 + index, 9, 10], [-1.0] * 3, 0)
        sample = LearnerSample(f"0-{index}", 0, 6, 3, columns)
        found.append(sample.with_scores(advantages={sample.sample_id: np.full(6, advantage, np.float32)}))
    return found


def start(config: Config, device: Any) -> PolicyLearner:
    """The learner after one update."""
    learner = PolicyLearner(config, 0, 1, device)
    learner.setup(("127.0.0.1", free_port()))
    learner.update(1, samples())
    return learner


class Saves:
    """The saves of one learner into a folder that is emptied after each."""

    def __init__(self, learner: PolicyLearner, folder: Path) -> None:
        self._learner = learner
        self._target = folder / "policy"
        self._step = 1
        self.sizes: list[int] = []

    def save(self, generation_s: float) -> tuple[float, WriteReport]:
        """Save, train on after that many seconds, and wait for the files; what the step waited."""
        self._target.mkdir()
        report = self._learner.save(str(self._target))
        time.sleep(generation_s)
        self._step += 1
        self._learner.update(self._step, samples())
        written = self._learner.finish_save()
        self.sizes = [path.stat().st_size for path in sorted(self._target.rglob("*")) if path.is_file()]
        shutil.rmtree(self._target)
        return report.seconds + written.waited, written

    def write_bare(self) -> float:
        """Seconds of writing files of these sizes, each with fsync."""
        self._target.mkdir()
        piece = memoryview(np.random.default_rng(0).bytes(WRITE_BYTES))
        started = time.perf_counter()
        for index, size in enumerate(self.sizes):
            with (self._target / str(index)).open("wb", buffering=0) as file:
                done = 0
                while done < size:
                    done += file.write(piece[: size - done])
                os.fsync(file.fileno())
        seconds = time.perf_counter() - started
        shutil.rmtree(self._target)
        return seconds


def bench(arguments: argparse.Namespace) -> dict[str, float]:
    """All rounds; seconds, but for `bytes`."""
    learner = start(bench_config(arguments.model, arguments.dtype, arguments.zero_stage), arguments.device)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=arguments.dir))
    runs: list[dict[str, float]] = []
    try:
        saves = Saves(learner, folder)
        first, _ = saves.save(arguments.generation)
        for _ in range(arguments.rounds):
            wait, report = saves.save(arguments.generation)
            at_once, _ = saves.save(0.0)
            runs.append({"wait": wait, "at_once": at_once, "behind": report.seconds, "bare": saves.write_bare()})
            print(", ".join(f"{name} {value:.3f}" for name, value in runs[-1].items()), file=sys.stderr)
    finally:
        shutil.rmtree(folder)
    learner.close()
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratios = {f"{name}_over_bare": found[name] / found["bare"] for name in ("wait", "at_once")}
    return {"bytes": float(report.bytes), "first_wait": first, **found, **ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generation", type=float, default=3.0, help="seconds between a save and the next update")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    os.environ.update(environment())
    where = machine()
    say_machine(where)
    found = bench(arguments)
    names = ("first wait, s", "wait, s", "at once, s", "behind, s", "bare, s", "wait / bare", "at once / bare")
    header = ("GB", *names)
    row = [f"{found['bytes'] / 1e9:.2f}", *(f"{found[key]:.3f}" for key in list(found)[1:])]
    show("A save of the policy with its optimizer", header, [row])
    settings = {k: v for k, v in vars(arguments).items() if k not in ("model", "dir")}
    about = {"machine": where, "threads": threads(), "versions": versions("torch", "deepspeed"), **settings}
    finish({**found, **about}, [markdown(header, [row])])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
