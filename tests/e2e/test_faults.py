"""Whatever dies or is interrupted: the run ends soon, says who it was and how, and leaves no process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.command import Command, tiny_config

END_S = 60.0


@pytest.fixture
def running(tiny_untied: Path, tmp_path: Path) -> Command:
    """A long run that has finished its first step, with a reference, so that every role is there."""
    config = tiny_config(tiny_untied, tmp_path / "runs", "doomed")
    config["algorithm"] = {"kl": {"where": "loss", "coefficient": 0.01}}
    command = Command(config, tmp_path, "run.steps=100000")
    command.until(lambda: command.steps_done() >= 1)
    return command


@pytest.mark.parametrize("role", ["policy", "rollout", "reference", "reward", "recorder"])
def test_a_killed_role_ends_the_run_and_is_named_with_pid_and_signal(running: Command, role: str) -> None:
    pid = running.role_pid(role)
    os.kill(pid, signal.SIGKILL)
    outcome = running.wait(END_S)
    assert outcome.code == 1
    assert f"{role} rank 0 (pid {pid}" in outcome.err
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


def test_sigterm_ends_the_run_like_ctrl_c(running: Command) -> None:
    running.process.send_signal(signal.SIGTERM)
    outcome = running.wait(END_S)
    assert outcome.code == 130
    assert outcome.left_running() == []


def test_a_killed_driver_leaves_nothing_behind(running: Command) -> None:
    running.observe()
    running.process.kill()
    outcome = running.wait(END_S)
    assert outcome.code == -signal.SIGKILL
    assert outcome.left_running() == []
