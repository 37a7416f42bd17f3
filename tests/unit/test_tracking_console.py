"""What the person who watches sees, on a terminal and off it, and how failing trackers are kept apart."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from rlhf.config import Config
from rlhf.tracking.console import ConsoleTracker, duration, headline
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.trackers import RunStatus, Trackers, make_trackers


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "try", "dir": tmp_path, "steps": 3},
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "reasoning_gym"}]},
        }
    )


@pytest.fixture
def folder(config: Config) -> RunFolder:
    return RunFolder.open(config.run)


STEP = {"reward/mean": 0.25, "rollout/tokens": 600, "rollout/tokens_per_second": 150.4, "time/step": 4.0}


def test_plain_lines_when_stdout_is_not_a_terminal(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.note("before the start")
    tracker.start(config, folder)
    tracker.log(STEP, 1)
    tracker.note("engine 0 restarted [rank 1]")
    tracker.log({**STEP, "reward/mean": 0.5, "policy/kl": 0.00123, "time/step": 6.0}, 2)
    tracker.log({**STEP, "reward/mean": 0.75, "time/step": 5.0}, 3)
    tracker.finish("done")
    # Time left after step 1: 1 step took 4 s, 2 to go: 8 s. After step 2: median of 4 and 6 is 5, 1 to go: 5 s.
    assert (
        stream.getvalue()
        == f"""\
before the start
run try: 3 steps, seed 1
  model   models/smollm2-135m-instruct (bfloat16)
  train   grpo advantages, ppo loss, learning rate 1e-05
  batch   8 prompts x 8 samples, up to 24 new tokens
  files   {folder.path}
step 1/3 | reward 0.250 | 150 tok/s | 4.0 s/step | 8s left
engine 0 restarted [rank 1]
step 2/3 | reward 0.500 | kl 0.0012 | 150 tok/s | 6.0 s/step | 5s left
step 3/3 | reward 0.750 | 150 tok/s | 5.0 s/step
done: 3 of 3 steps in 15s
  reward  0.250 at step 1, 0.750 at step 3
  tokens  1,800 generated
  files   {folder.path}
"""
    )


def test_steps_that_are_done_again_count_once_and_their_time_twice(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(config, folder)
    tracker.rewind(None)
    for step in (1, 2):
        tracker.log(STEP, step)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.log({**STEP, "reward/mean": 0.5}, step)
    tracker.finish("done")
    # Four steps of 4 s were made; step 2 counts once.
    assert "done: 3 of 3 steps in 16s" in stream.getvalue()
    assert "reward  0.250 at step 1, 0.500 at step 3" in stream.getvalue()


def test_a_reward_of_a_step_that_was_done_again_is_not_the_first(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(config, folder)
    tracker.log(STEP, 1)
    tracker.rewind(None)
    tracker.log({**STEP, "reward/mean": 0.5}, 1)
    tracker.finish("failed")
    assert "reward  0.500 at step 1, 0.500 at step 1" in stream.getvalue()


def test_evaluation_is_not_a_step(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(config, folder)
    tracker.log({"eval/accuracy": 0.25}, 0)
    tracker.log(STEP, 1)
    tracker.log({"eval/accuracy": 0.5}, 1)
    tracker.finish("done")
    assert "done: 1 of 3 steps in 4s" in stream.getvalue()
    assert "step 0" not in stream.getvalue()


def test_each_plain_line_is_flushed(config: Config, folder: RunFolder) -> None:
    class Piped(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Piped()
    tracker = ConsoleTracker(stream)
    tracker.start(config, folder)
    tracker.log(STEP, 1)
    assert stream.flushed == stream.getvalue() != ""


def test_bar_on_a_terminal_shows_step_figures_and_notes(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(
        console=Console(file=stream, force_terminal=True, width=120, color_system=None, record=True)
    )
    tracker.start(config, folder)
    tracker.log({**STEP, "policy/kl": 0.5}, 1)
    tracker.note("engine 0 restarted [rank 1]")
    tracker.log(STEP, 2)
    tracker.finish("interrupted")
    shown = stream.getvalue()
    assert "engine 0 restarted [rank 1]\n" in shown
    assert "step 2/3" in shown and "reward 0.250 · 150 tok/s · 4.0 s/step · 4s left" in shown
    assert "interrupted: 2 of 3 steps in 8s" in shown
    assert shown.rindex("interrupted:") > shown.rindex("step 2/3")  # the bar is closed before the summary


def test_terminal_gets_the_bar_and_a_dumb_one_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert ConsoleTracker(Terminal()).is_bar
    monkeypatch.setenv("TERM", "dumb")
    assert not ConsoleTracker(Terminal()).is_bar
    assert not ConsoleTracker(io.StringIO()).is_bar


def test_figures_that_do_not_apply_are_left_out() -> None:
    assert headline({"reward/mean": 1.0}) == ["reward 1.000"]
    assert headline({}) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (7620, "2h07m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_run_that_did_no_step_still_ends_with_a_summary(config: Config, folder: RunFolder) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(config, folder)
    tracker.finish("failed")
    assert stream.getvalue().endswith(f"failed: 0 of 3 steps in 0s\n  files   {folder.path}\n")


class Recording:
    """A tracker that notes what it is told, and fails where it is told to."""

    def __init__(self, name: str, fails_in: str = "") -> None:
        self.name, self._fails_in, self.calls = name, fails_in, []  # type: ignore[var-annotated]

    def _call(self, *call: object) -> None:
        self.calls.append(call)
        if call[0] == self._fails_in:
            raise ConnectionError("no route to host")

    def start(self, config: Config, folder: RunFolder) -> None:
        self._call("start")

    def rewind(self, step: int | None) -> None:
        self._call("rewind", step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("log", step)

    def finish(self, status: RunStatus) -> None:
        self._call("finish", status)


@pytest.mark.parametrize("where", ["start", "rewind", "log", "finish"])
def test_failing_tracker_is_reported_once_and_the_others_go_on(config: Config, folder: RunFolder, where: str) -> None:
    shown: list[str] = []
    bad, good = Recording("bad", fails_in=where), Recording("good")
    trackers = Trackers([bad, good], shown.append)
    trackers.start(config, folder)
    trackers.rewind(0)
    for step in (1, 2):
        trackers.log({}, step)
    trackers.finish("done")
    trackers.finish("failed")
    assert good.calls == [("start",), ("rewind", 0), ("log", 1), ("log", 2), ("finish", "done")]
    assert bad.calls[-1][0] == where and [call[0] for call in bad.calls].count(where) == 1
    assert shown == [f"tracker bad failed in {where} and is off from now on: ConnectionError: no route to host"]


def test_terminal_that_is_gone_does_not_stop_the_run(
    config: Config, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    console, other = ConsoleTracker(Gone()), Recording("other")
    trackers = Trackers([console, other], console.note)
    with caplog.at_level(logging.WARNING):
        trackers.start(config, folder)
        trackers.note("still here")
    trackers.finish("done")
    assert other.calls == [("start",), ("finish", "done")]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker console failed in start and is off from now on: BrokenPipeError: [Errno 32] Broken pipe",
        "still here",
    ]


def test_trackers_are_those_of_the_configuration(config: Config) -> None:
    def names(**tracking: object) -> list[str]:
        chosen = Config.model_validate({**config.model_dump(), "tracking": tracking})
        return [tracker.name for tracker in make_trackers(chosen)._active]

    assert names() == ["console"]
    assert names(console=False) == []
    assert names(console=False, tensorboard=True, wandb={"mode": "offline"}) == ["tensorboard", "wandb"]
