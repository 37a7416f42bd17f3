"""The records that travel: one convention for positions, and prompts that can't pass for samples."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from rlhf.trajectories import Columns, Group, Prompt, PromptDraw, Trajectory


def trajectory(**changes: object) -> Trajectory:
    header = Trajectory(
        prompt_id="p7",
        group_id=12,
        sample_index=3,
        prompt_tokens=2,
        response_tokens=3,
        finish_reason="stop",
        weight_version=4,
        engine=0,
    )
    return dataclasses.replace(header, **changes)  # type: ignore[arg-type]


def test_index_t_of_every_column_belongs_to_token_t() -> None:
    columns = Columns.from_completion((5, 6), [7, 8, 9], [-0.5, -1.0, -0.25], 4)
    assert columns.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert columns.loss_mask.tolist() == [False, False, True, True, True]
    assert columns.logprobs[2:].tolist() == [-0.5, -1.0, -0.25]
    assert columns.weight_versions.tolist() == [-1, -1, 4, 4, 4]


def test_logprob_of_a_prompt_position_poisons_what_reads_it() -> None:
    columns = Columns.from_completion((5, 6), [7], [-0.5], 0)
    assert np.isnan(columns.logprobs[:2]).all()
    assert np.isnan(columns.logprobs.sum())


def test_columns_have_the_types_that_travel() -> None:
    columns = Columns.from_completion((1,), [2], [-0.1], 0)
    *arrays, mask = (getattr(columns, field.name) for field in dataclasses.fields(columns))
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.float32, np.int32]
    assert mask is None


def test_tokens_of_one_response_may_come_from_different_versions() -> None:
    columns = Columns.from_completion([5], [7, 8], [-0.5, -1.0], [3, 4])
    assert columns.weight_versions.tolist() == [-1, 3, 4]


def test_empty_response_gives_columns_of_the_prompt_only() -> None:
    columns = Columns.from_completion((1, 2), [], [], 0)
    assert columns.token_ids.tolist() == [1, 2]
    assert not columns.loss_mask.any()


def test_missing_logprob_is_an_error_and_not_a_shift() -> None:
    with pytest.raises(ValueError, match="3 sampled ids but 2 log-probs"):
        Columns.from_completion((1,), [2, 3, 4], [-0.1, -0.2], 0)


def test_sample_id_is_the_draw_and_the_place_in_its_group() -> None:
    assert trajectory().sample_id == "12-3"
    assert trajectory().total_tokens == 5


def test_scoring_leaves_the_unscored_header_unchanged() -> None:
    unscored, by_function = trajectory(), {"match": 1.0, "length": None}
    scored = unscored.with_reward(0.5, by_function).with_advantage(-1.0)
    by_function["match"] = 9.0
    assert (unscored.reward, unscored.advantage, dict(unscored.rewards_by_function)) == (None, None, {})
    assert (scored.reward, scored.advantage) == (0.5, -1.0)
    assert scored.rewards_by_function == {"match": 1.0, "length": None}


def test_failed_reward_is_none_and_not_zero() -> None:
    assert trajectory().with_reward(None, {"match": None}).reward is None


def test_group_is_known_by_its_draw_so_one_prompt_may_be_drawn_twice() -> None:
    prompt = Prompt("p7", "1 + 1 =", (5, 6))
    first = Group(PromptDraw(prompt, draw_index=12, epoch=0), ())
    second = Group(PromptDraw(prompt, draw_index=40, epoch=1), ())
    assert (first.group_id, second.group_id) == (12, 40)


def test_headers_are_immutable_and_travel_between_processes() -> None:
    header = trajectory().with_reward(1.0, {"match": 1.0})
    assert pickle.loads(pickle.dumps(header)) == header
    with pytest.raises(dataclasses.FrozenInstanceError):
        header.reward = 2.0  # type: ignore[misc]
