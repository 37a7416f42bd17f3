"""Whatever dies or is interrupted: the run ends soon, says who it was and how, and leaves no process."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from rlhf.checkpoint import CheckpointStore
from tests.e2e.command import Command, tiny_config

END_S = 60.0
ROLES = ("policy", "rollout", "reference", "reward", "recorder")
# Bytes; less than the policy's shards, more than a log.
FILE_LIMIT = 500_000


WIDE = ("policy.ranks=2", "policy.zero_stage=3", "rollout.engines=2")


@pytest.fixture
def starting(request: pytest.FixtureRequest, tiny_untied: Path, tmp_path: Path) -> Command:
    """A long run whose roles all have a process (a reference too) and are still loading; `param` adds overrides."""
    config = tiny_config(tiny_untied, tmp_path / "runs", "doomed")
    config["algorithm"] = {"kl": {"where": "loss", "coefficient": 0.01}}
    command = Command(config, tmp_path, "run.steps=100000", *getattr(request, "param", ()))
    command.until(lambda: all(command.find_role(role) is not None for role in ROLES))
    return command


@pytest.fixture
def running(starting: Command) -> Command:
    """The same run after its first step."""
    starting.until(lambda: starting.steps_done() >= 1)
    return starting


@pytest.mark.parametrize(
    ("starting", "role", "rank"),
    [(WIDE, "policy", 1), ((), "rollout", 0), ((), "reference", 0)],
    ids=["policy", "rollout", "reference"],
    indirect=["starting"],
)
def test_a_role_killed_while_it_works_ends_the_run_and_is_named(running: Command, role: str, rank: int) -> None:
    # Rank 1 of 2 at ZeRO 3: rank 0 is left in a gather, and the killed one is named all the same.
    kill(running, role, rank)


# These two are killed early to keep the suite short; when makes no difference to who notices.
@pytest.mark.parametrize("role", ["reward", "recorder"])
def test_a_role_killed_while_the_run_starts_ends_it_and_is_named(starting: Command, role: str) -> None:
    kill(starting, role)


def kill(command: Command, role: str, rank: int = 0) -> None:
    pid = command.find_role(role, rank)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    outcome = command.wait(END_S)
    assert outcome.code == 1
    assert f"{role} rank {rank} (pid {pid}" in outcome.err
    assert "SIGKILL" in outcome.err or "no exit status" in outcome.err
    assert outcome.left_running() == []


def test_a_killed_engine_core_ends_the_run_and_is_named_with_pid_and_signal(running: Command) -> None:
    pid = running.engine_core_pid()
    os.kill(pid, signal.SIGKILL)
    outcome = running.wait(END_S)
    assert outcome.code == 1
    assert "rollout" in outcome.err
    assert f"(pid {pid}): killed by signal 9" in outcome.err
    assert outcome.left_running() == []


def test_ctrl_c_ends_the_run_with_130_and_no_traceback(running: Command) -> None:
    running.process.send_signal(signal.SIGINT)
    outcome = running.wait(END_S)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert outcome.left_running() == []


def test_sigterm_ends_a_starting_run_like_ctrl_c(starting: Command) -> None:
    starting.process.send_signal(signal.SIGTERM)
    outcome = starting.wait(END_S)
    assert outcome.code == 130
    assert outcome.left_running() == []


def test_a_killed_driver_leaves_nothing_behind(running: Command) -> None:
    running.observe()
    running.process.kill()
    outcome = running.wait(END_S)
    assert outcome.code == -signal.SIGKILL
    assert outcome.left_running() == []


def saving(model: Path, folder: Path, on_failed_save: str) -> Command:
    """A long run that saves every step, after its second checkpoint."""
    config = tiny_config(model, folder / "runs", "saves")
    config["checkpoint"] = {"every": 1, "keep": 2, "on_failed_save": on_failed_save}
    command = Command(config, folder, "run.steps=100000")
    command.until(lambda: newest(command) >= 2)
    return command


def newest(command: Command) -> int:
    """The step of the checkpoint that `latest` names, 0 while there is none."""
    latest = command.folder / "checkpoints" / "latest"
    return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0


def limit_files(command: Command, size: int) -> None:
    """From now on the policy's process can write no file beyond `size` bytes, as on a disk that is full."""
    pid = command.find_role("policy")
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_save_that_finds_no_room_ends_the_run_and_leaves_the_checkpoint_before(
    tiny_untied: Path, tmp_path: Path
) -> None:
    command = saving(tiny_untied, tmp_path, "raise")
    limit_files(command, FILE_LIMIT)
    outcome = command.wait(END_S)
    assert outcome.code == 1
    assert "File too large" in outcome.err
    assert str(outcome.folder / "checkpoints" / ".writing-step-") in outcome.err
    # Contents are compared with checksums, and nothing was damaged on the way.
    said: list[str] = []
    chosen = CheckpointStore(outcome.folder / "checkpoints", keep=2).choose("must", said.append)
    assert chosen is not None and chosen.step == newest(command) >= 2
    assert said == []
    assert list((outcome.folder / "checkpoints").glob(".writing-*")) == []
    assert outcome.left_running() == []


def test_a_run_that_may_go_on_without_saving_says_so_and_saves_again_when_there_is_room(
    tiny_untied: Path, tmp_path: Path
) -> None:
    command = saving(tiny_untied, tmp_path, "continue")
    limit_files(command, FILE_LIMIT)
    command.until(lambda: "could not be saved, and the run goes on" in command.output())
    last, done = newest(command), command.steps_done()
    command.until(lambda: command.steps_done() >= done + 2)
    assert newest(command) == last
    limit_files(command, resource.RLIM_INFINITY)
    command.until(lambda: newest(command) > last)
    command.process.send_signal(signal.SIGINT)
    outcome = command.wait(END_S)
    assert outcome.code == 130
    assert "File too large" in outcome.out
    steps = [line["step"] for line in outcome.metrics()]
    assert steps == list(range(1, len(steps) + 1))
