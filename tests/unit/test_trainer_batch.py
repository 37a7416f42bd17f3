"""From scored groups to a training batch: groups are explicit, and every sample has one outcome."""

from dataclasses import replace

import numpy as np
import pytest

from rlhf.trainers.batch import StaleSample
from rlhf.trainers.batch import assemble as assemble_at
from rlhf.trainers.scoring import ScoredGroup
from rlhf.trajectories import Columns, Group, Prompt, PromptDraw, Trajectory


def assemble(groups):
    return assemble_at(groups, weight_version=0)


def scored(group_id, rewards, errors=(), figures=None):
    columns = Columns.from_completion((5, 76), [11], [-1.0], 0)
    trajectories = tuple(
        Trajectory(f"p{group_id}", group_id, i, 2, 1, "stop", 0, 0, columns).with_reward(r, {"f": r})
        for i, r in enumerate(rewards)
    )
    draw = PromptDraw(Prompt(f"p{group_id}", "1+", (5, 76)), group_id, 0)
    return ScoredGroup(Group(draw, trajectories), None, dict(errors), figures or [{} for _ in rewards])


def test_a_group_is_compared_with_itself_alone_whatever_order_groups_finish_in():
    # Two prompts whose answers are all equal within the group: every advantage is 0, none is relative to the other.
    batch = assemble([scored(1, [0.0] * 4), scored(0, [1.0] * 4)])
    assert [s.advantage for s in batch.samples] == [0.0] * 8
    assert [s.sample_id for s in batch.samples] == [f"{g}-{i}" for g in (0, 1) for i in range(4)]


def test_a_failed_sample_leaves_and_the_others_are_compared_among_themselves():
    # [1, None, 3]: mean 2, population standard deviation 1.
    batch = assemble([scored(0, [1.0, None, 3.0], errors={"0-1": "boom"})])
    assert [(s.sample_id, s.advantage) for s in batch.samples] == [("0-0", -1.0), ("0-2", 1.0)]
    assert (batch.failed, batch.filtered, batch.errors, batch.first_error) == (1, 0, 1, "boom")


def test_what_is_left_of_a_group_with_fewer_than_two_rewards_is_filtered():
    batch = assemble([scored(0, [1.0, None, None]), scored(1, [0.0, 1.0])])
    assert (batch.failed, batch.filtered) == (2, 1)
    assert {s.group_id for s in batch.samples} == {1}
    # All samples of the step are still recorded, with what happened to them.
    assert [t.advantage for t in batch.trajectories] == [None, None, None, -1.0, 1.0]


def test_each_sample_is_trained_failed_or_filtered():
    rng = np.random.default_rng(0)
    groups = [
        scored(g, [None if rng.random() < 0.4 else float(rng.integers(0, 3)) for _ in range(4)]) for g in range(50)
    ]
    batch = assemble(groups)
    assert len(batch.samples) + batch.failed + batch.filtered == 200


def test_what_reward_functions_report_is_averaged_over_the_samples_that_have_it():
    batch = assemble([scored(0, [0.0, 1.0], figures=[{"f/characters": 4.0}, {}]), scored(1, [0.0, 1.0])])
    assert batch.metrics() == {"reward/errors": 0.0, "reward/f/characters": pytest.approx(4.0)}


def test_a_sample_of_another_weight_version_is_never_trained_on():
    with pytest.raises(StaleSample, match=r"sample 0-0 is of version 0, not 1"):
        assemble_at([scored(0, [0.0, 1.0])], weight_version=1)


def test_a_reward_that_is_not_finite_counts_as_failed():
    batch = assemble([scored(0, [float("inf"), 0.0, 2.0])])
    assert (batch.failed, [s.advantage for s in batch.samples]) == (1, [-1.0, 1.0])


def test_a_sample_that_the_engine_gave_up_is_failed_whatever_its_reward():
    entry = scored(0, [1.0, 2.0, 3.0])
    first, *others = entry.group.trajectories
    given_up = replace(
        entry, group=replace(entry.group, trajectories=(replace(first, finish_reason="aborted"), *others))
    )
    batch = assemble([given_up])
    assert (batch.failed, [s.sample_id for s in batch.samples]) == (1, ["0-1", "0-2"])
