"""Interrupted equals uninterrupted: the same trajectories and the same weights, bit for bit, after a kill."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.command import Command, tiny_config

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from exactness import Case

END_S = 60.0
GRAPH = Path(__file__).with_name("graph.py")


# What changes over a step and need not be in a checkpoint: by the beginning of its path, with the reason.
TRANSIENT = {
    r"prompts\._(order|epoch)\b": "the order of an epoch, which follows from the seed and is made when it is needed",
    r"fleet\._last\b": "the report of the last sync, whose times are those of this process",
    r"fleet\._pool\._router\b": "between steps no request is with it; what is left are its numbers for the next ones",
    r"fleet\._pool\.activity\b": "what engines were busy with in this step",
    r"run\._checkpoints\._": "where saving stands; a new process finds that in the folder",
    r"run\._journal\._trackers\b": "what the terminal shows of this process",
}


def looks(run: Path) -> list[dict[str, list[str]]]:
    """What `graph.py` found at a run's beginning and after each step: by path what covers a value, and the value."""
    return [json.loads(line)["leaves"] for line in (run.parents[1] / "graph.jsonl").read_text().splitlines()]


def unregistered(found: list[dict[str, list[str]]]) -> list[str]:
    """Paths of values that a step changed and no checkpoint has."""
    changed = set[str]()
    for before, after in itertools.pairwise(found):
        paths = before.keys() | after.keys()
        changed |= {path for path in paths if before.get(path) != after.get(path)}
    covers = {path: cover for look in found for path, (cover, _) in look.items()}
    return sorted(path for path in changed if not covers[path] and not is_transient(path))


def registered(look: dict[str, list[str]]) -> dict[str, str]:
    """The values that checkpoints have to bring back."""
    return {path: value for path, (cover, value) in look.items() if cover and not is_transient(path)}


def is_transient(path: str) -> bool:
    return any(re.match(known, path) for known in TRANSIENT)


def saved(command: Command, step: int) -> bool:
    latest = command.folder / "checkpoints" / "latest"
    return latest.exists() and latest.read_text().strip() == f"step-{step:06d}"


@pytest.mark.parametrize("setup", ["grpo", "ppo"])
def test_a_run_that_is_killed_and_resumed_ends_like_one_that_was_not(
    setup: str, tiny_untied: Path, tmp_path: Path
) -> None:
    case = Case(setup, tiny_untied, 1, tmp_path, command=(str(GRAPH),))
    assert case.interrupted() == []
    cut = case.cut
    assert "goes on after step 3" in cut.tail(1000)

    # Nothing that a step changes is forgotten, and what is restored is as it was.
    whole, resumed = looks(case.whole.folder), looks(cut.folder)
    assert unregistered(whole) == []
    assert registered(whole[3]) == registered(resumed[-4])
    # Both have seen what there is: the place in the data, and the ledger.
    assert {"prompts._next", "ledger.trained"} <= registered(whole[3]).keys()

    # Once more: there is nothing left to do, and nothing is done.
    lines = (cut.folder / "metrics.jsonl").read_bytes()
    cut.start("run.if_exists=resume")
    cut.finish()
    assert "finished already" in cut.tail()
    assert (cut.folder / "metrics.jsonl").read_bytes() == lines


def test_a_lost_learner_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tiny_untied: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_untied, tmp_path / "runs", "recovers")
    config["checkpoint"] = {"every": 2, "keep": 1}
    command = Command(config, tmp_path, "run.steps=100000", "fault_tolerance.max_restarts=1", "policy.ranks=2")
    command.until(lambda: saved(command, 2))
    pid = command.find_role("policy", 1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    command.until(lambda: "goes on after step" in command.output())
    start = int(command.output().rpartition("goes on after step ")[2].partition(",")[0])
    command.until(lambda: command.metrics()[-1]["step"] >= start + 3)
    command.process.send_signal(signal.SIGINT)
    outcome = command.wait(END_S)
    assert outcome.code == 130
    assert f"restart 1 of 1: policy rank 1 (pid {pid}" in outcome.out
    steps = outcome.metrics()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        assert line["ledger/drawn"] == line["ledger/trained"] == 12 * line["step"]
    assert all(line["ledger/redone"] % 12 == 0 for line in steps)
    assert outcome.left_running() == []
