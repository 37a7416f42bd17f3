"""Two engines, of which each is killed once in the middle of a rollout: the run goes on, and no sample is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.command import Command, tiny_config

END_S = 60.0


def long_rollouts(model: Path, folder: Path, name: str) -> dict[str, object]:
    """Steps that are spent in generation, so that a kill after one hits the next one's rollout."""
    config = tiny_config(model, folder / "runs", name)
    config["rollout"] |= {"prompts_per_step": 24, "samples_per_prompt": 4, "max_new_tokens": 120, "min_new_tokens": 100}
    config["policy"]["max_tokens_per_microbatch"] = 4096
    return config


@pytest.fixture
def fleet(tiny_untied: Path, tmp_path: Path) -> Command:
    """A run with two engines, each of which may be started again once, after its first step."""
    config = long_rollouts(tiny_untied, tmp_path, "fleet")
    overrides = ("run.steps=100000", "rollout.engines=2", "fault_tolerance.max_restarts=1")
    command = Command(config, tmp_path, *overrides)
    command.until(lambda: command.steps_done() >= 1)
    return command


def test_a_killed_actor_and_a_killed_engine_core_cost_their_samples_a_retry_and_nothing_else(fleet: Command) -> None:
    for lost, pid in ((1, fleet.find_role("rollout", 1)), (2, None)):
        if pid is None:
            pid = fleet.engine_core_pid()  # of engine 0
        before = fleet.steps_done()
        os.kill(pid, signal.SIGKILL)
        # The step that was hit and another one are completed by the engine that is left.
        fleet.until(lambda before=before: fleet.steps_done() >= before + 2)
        fleet.until(lambda: fleet.metrics()[-1]["fleet/serving"] == 2)
        assert fleet.metrics()[-1]["fleet/lost"] == lost
    fleet.process.send_signal(signal.SIGINT)
    outcome = fleet.wait(END_S)
    assert outcome.code == 130
    steps = outcome.metrics()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["fleet/retries"] > 0
    for line in steps:
        # 24 x 4 samples a step, each of them trained on once, and none left over.
        assert line["ledger/drawn"] == line["ledger/trained"] == 96 * line["step"]
        assert line["ledger/in_flight"] == line["ledger/buffered"] == line["ledger/failed"] == 0
        assert line["parity/max_abs"] <= 1e-4
    assert "serves again (restart 1)" in outcome.out
    assert outcome.left_running() == []


def test_a_stopped_engine_ends_a_run_that_has_no_other_within_its_deadlines_and_is_named(
    tiny_untied: Path, tmp_path: Path
) -> None:
    config = long_rollouts(tiny_untied, tmp_path, "stopped")
    overrides = ("run.steps=100000", "rollout.probe_every_s=1", "rollout.probe_deadline_s=4")
    command = Command(config, tmp_path, *overrides)
    command.until(lambda: command.steps_done() >= 1)
    os.kill(command.engine_core_pid(), signal.SIGSTOP)
    # Three probes of 4 s, one a second, and what it takes to end everything.
    outcome = command.wait(END_S)
    assert outcome.code == 1
    assert "no engine is left that could serve" in outcome.err
    assert "engine 0: probe of rollout engine 0: not done after 4 s" in outcome.err
    assert outcome.left_running() == []
