"""From scored groups to a training batch: groups are explicit, and every sample has one outcome."""

from dataclasses import replace

import numpy as np
import pytest

from rlhf.batching import Estimates
from rlhf.config import config_from_dict
from rlhf.trainers.batch import StaleSample
from rlhf.trainers.batch import assemble as assemble_at
from rlhf.trainers.scoring import ScoredGroup
from rlhf.trajectories import Columns, Group, Prompt, PromptDraw, Trajectory


def config(**sections):
    return config_from_dict(
        {
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "reasoning_gym"}], **sections.pop("reward", {})},
            **sections,
        },
        check_files=False,
    )


def assemble(groups, **sections):
    return assemble_at(groups, config(**sections), weight_version=0)


def scored(group_id, rewards, errors=(), figures=None):
    columns = Columns.from_completion((5, 76), [11], [-1.0], 0)
    trajectories = tuple(
        Trajectory(f"p{group_id}", group_id, i, 2, 1, "stop", 0, 0, columns).with_reward(r, {"f": r})
        for i, r in enumerate(rewards)
    )
    draw = PromptDraw(Prompt(f"p{group_id}", "1+", (5, 76)), group_id, 0)
    return ScoredGroup(Group(draw, trajectories), None, dict(errors), figures or [{} for _ in rewards])


def ids(batch):
    return [entry.sample.sample_id for entry in batch.samples]


def test_samples_are_in_the_order_of_the_draws_whatever_order_groups_finish_in():
    batch = assemble([scored(1, [0.0] * 4), scored(0, [1.0] * 4)])
    assert ids(batch) == [f"{g}-{i}" for g in (0, 1) for i in range(4)]
    assert [entry.reward for entry in batch.samples] == [1.0] * 4 + [0.0] * 4


def test_a_failed_sample_leaves_and_the_others_stay():
    batch = assemble([scored(0, [1.0, None, 3.0], errors={"0-1": "boom"})])
    assert ids(batch) == ["0-0", "0-2"]
    assert (batch.failed, batch.filtered, batch.errors, batch.first_error) == (1, 0, 1, "boom")


def test_what_is_left_of_a_group_with_too_few_rewards_to_compare_is_filtered():
    batch = assemble([scored(0, [1.0, None, None]), scored(1, [0.0, 1.0])])
    assert (batch.failed, batch.filtered) == (2, 1)
    assert ids(batch) == ["1-0", "1-1"]


def test_an_estimator_that_compares_nothing_keeps_a_single_sample():
    batch = assemble([scored(0, [1.0, None, None])], algorithm={"advantage": "reinforce"})
    assert (ids(batch), batch.failed, batch.filtered) == (["0-0"], 2, 0)


def test_a_group_whose_greedy_response_has_no_reward_is_filtered():
    groups = [scored(0, [1.0, 0.0]), scored(1, [0.0, 1.0])]
    greedy = {g: scored(g, [r]).group.trajectories[0] for g, r in ((0, None), (1, 0.5))}
    remax = config(algorithm={"advantage": "remax"})
    batch = assemble_at(groups, remax, weight_version=0, greedy=greedy)
    assert (batch.filtered, ids(batch)) == (2, ["1-0", "1-1"])
    assert [entry.baseline for entry in batch.samples] == [0.5, 0.5]


def test_rewards_of_samples_and_greedy_responses_are_shaped_alike():
    # Clipped to 1; one token of 24 is far from the overlong buffer; the raw reward stays in the header.
    shaped = config(algorithm={"advantage": "remax"}, reward={"shaping": {"clip": 1.0}})
    greedy = {0: scored(0, [7.0]).group.trajectories[0]}
    batch = assemble_at([scored(0, [5.0, -3.0])], shaped, weight_version=0, greedy=greedy)
    assert [(entry.reward, entry.baseline) for entry in batch.samples] == [(1.0, 1.0), (-1.0, 1.0)]
    assert [t.reward for t in batch.trajectories] == [5.0, -3.0]
    assert batch.metrics()["reward/shaped_mean"] == 0.0


def test_estimates_go_to_the_headers_of_what_is_trained_on_and_into_the_metrics():
    batch = assemble([scored(0, [1.0, None, None]), scored(1, [0.0, 1.0])])
    estimates = Estimates({"advantage/mean": 0.0}, {"1-0": -1.0, "1-1": 1.0})
    done = batch.estimated([entry.sample for entry in batch.samples], estimates)
    # All samples of the step are still recorded, with what happened to them.
    assert [t.advantage for t in done.trajectories] == [None, None, None, -1.0, 1.0]
    assert done.metrics()["advantage/mean"] == 0.0


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
        assemble_at([scored(0, [0.0, 1.0])], config(), weight_version=1)


def test_a_reward_that_is_not_finite_counts_as_failed():
    batch = assemble([scored(0, [float("inf"), 0.0, 2.0])])
    assert (batch.failed, ids(batch)) == (1, ["0-1", "0-2"])


def test_a_sample_that_the_engine_gave_up_is_failed_whatever_its_reward():
    entry = scored(0, [1.0, 2.0, 3.0])
    first, *others = entry.group.trajectories
    given_up = replace(
        entry, group=replace(entry.group, trajectories=(replace(first, finish_reason="aborted"), *others))
    )
    batch = assemble([given_up])
    assert (batch.failed, ids(batch)) == (1, ["0-1", "0-2"])
