"""What engines were busy with, by a clock that the test moves."""

import pytest

from rlhf.rollout.activity import Activity


class Clock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


def test_live_sequences_and_idle_shares_are_over_the_time_since_the_mark(clock):
    activity = Activity(clock)
    activity.mark()
    # Engine 0 runs two sequences from 0 to 10 s; engine 1 one from 0 to 4 s.
    for engine in (0, 0, 1):
        activity.begin(engine)
    clock.time += 4
    activity.end(1)
    clock.time += 6
    activity.end(0)
    activity.end(0)
    metrics = activity.metrics([0, 1, 2])
    # Alive: 3 until 4 s, then 2; at 40 % the end at 4 s has just been.
    assert [metrics[f"rollout/live_{n}"] for n in (10, 30, 40, 90)] == [3, 3, 2, 2]
    # Engine 1 is idle for 6 of 10 s, engine 2 always.
    assert [metrics[f"rollout/idle_share_{e}"] for e in (0, 1, 2)] == [0.0, 0.6, 1.0]


def test_the_tail_is_from_nine_tenths_of_the_answers_to_the_last(clock):
    activity = Activity(clock)
    activity.mark()
    for _ in range(10):
        activity.begin(0)
    # Answers after 1, 2, ..., 9 s, and a straggler after 30 s.
    for _ in range(9):
        clock.time += 1
        activity.end(0)
    clock.time += 21
    activity.end(0)
    # 90 % are done with the ninth, at 9 s.
    assert activity.metrics([0])["rollout/tail_seconds"] == 21


def test_what_runs_across_a_mark_is_still_alive_after_it(clock):
    activity = Activity(clock)
    activity.begin(0)
    clock.time += 5
    activity.mark()
    clock.time += 10
    activity.end(0)
    metrics = activity.metrics([0])
    assert metrics["rollout/live_50"] == 1 and metrics["rollout/idle_share_0"] == 0


def test_where_nothing_ran_there_is_no_figure(clock):
    activity = Activity(clock)
    activity.mark()
    assert activity.metrics([0]) == {}
