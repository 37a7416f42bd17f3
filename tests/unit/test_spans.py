"""Spans: intervals with a parent, drained and forgotten."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from rlhf.tracking.spans import Span, SpanRecorder, now


def test_enclosing_span_is_the_parent() -> None:
    recorder = SpanRecorder()
    with recorder.span("step", step=3) as outer, recorder.span("rollout", step=3) as inner:
        assert outer != inner
    rollout, step = recorder.drain()
    assert (rollout.name, rollout.parent, rollout.step) == ("rollout", outer, 3)
    assert (step.name, step.parent) == ("step", None)
    assert step.start <= rollout.start <= rollout.end <= step.end


def test_given_parent_goes_before_the_enclosing_span() -> None:
    recorder = SpanRecorder()
    with recorder.span("step"), recorder.span("score", parent="elsewhere"):
        pass
    assert recorder.drain()[0].parent == "elsewhere"


def test_span_is_recorded_when_its_block_raises() -> None:
    recorder = SpanRecorder()
    with pytest.raises(ZeroDivisionError), recorder.span("step"):
        raise ZeroDivisionError
    assert [span.name for span in recorder.drain()] == ["step"]


def test_seconds_are_of_spans_of_that_name_that_began_since() -> None:
    # Of "pass": one of 5 s before, and 1 + 2 s since.
    recorder = SpanRecorder()
    for name, start, seconds in (("pass", 0.0, 5.0), ("pass", 10.0, 1.0), ("other", 11.0, 7.0), ("pass", 12.0, 2.0)):
        recorder.absorb([Span(name, "policy", 1, start, start + seconds, "", None)])
    assert recorder.seconds("pass", since=10.0) == 3.0
    assert len(recorder.drain()) == 4
    assert recorder.seconds("pass", since=0.0) == 0.0


async def test_concurrent_tasks_do_not_become_each_others_parents() -> None:
    recorder = SpanRecorder()
    both_inside = asyncio.Barrier(2)

    async def score(name: str) -> None:
        with recorder.span(name):
            await both_inside.wait()

    with recorder.span("step") as step:
        await asyncio.gather(score("a"), score("b"))
    parents = {span.name: span.parent for span in recorder.drain()}
    assert parents == {"a": step, "b": step, "step": None}


def test_drain_forgets_so_that_nothing_grows_over_a_run() -> None:
    recorder = SpanRecorder()
    for step in range(1, 41):
        with recorder.span("step", step=step):
            pass
        assert [span.step for span in recorder.drain()] == [step]
    assert recorder.drain() == []


def test_recorder_that_nobody_drains_keeps_the_newest_and_counts_the_lost() -> None:
    recorder = SpanRecorder(limit=3)
    for step in range(5):
        with recorder.span("request", step=step):
            pass
    assert recorder.lost == 2
    assert [span.step for span in recorder.drain()] == [2, 3, 4]


def test_spans_of_another_process_are_absorbed_as_they_are() -> None:
    learner, driver = SpanRecorder("policy"), SpanRecorder()
    with learner.span("update"):
        pass
    spans = learner.drain()
    driver.absorb(spans)
    assert driver.drain() == spans
    assert spans[0].role == "policy"


def test_absorbed_spans_that_do_not_know_their_step_get_the_drivers() -> None:
    engine, driver = SpanRecorder("rollout"), SpanRecorder()
    with engine.span("receive_weights"), engine.span("generate", step=2):
        pass
    driver.absorb(engine.drain(), step=3)
    assert {span.name: span.step for span in driver.drain()} == {"receive_weights": 3, "generate": 2}


def test_span_names_its_process_and_is_json() -> None:
    recorder = SpanRecorder("rollout")
    with recorder.span("generate", step=2):
        pass
    row = json.loads(json.dumps(recorder.drain()[0].as_dict()))
    assert row["process"].endswith(f":{os.getpid()}")
    assert (row["name"], row["role"], row["step"]) == ("generate", "rollout", 2)


def test_an_interval_recorded_without_a_block_belongs_to_the_same_process_as_the_others():
    recorder = SpanRecorder("rollout")
    with recorder.span("receive_weights"):
        pass
    recorder.record("generate", start=now() - 1.0)
    block, interval = recorder.drain()
    assert interval.process == block.process != ""
    assert interval.seconds == pytest.approx(1.0, abs=0.5)
