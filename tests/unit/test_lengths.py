"""Expected response lengths: per prompt, drawn towards the mean over all."""

from __future__ import annotations

import json

import pytest

from rlhf.rollout.lengths import LengthModel


def _model(**seen: list[int]) -> LengthModel:
    model = LengthModel()
    for prompt_id, lengths in seen.items():
        for tokens in lengths:
            model.observe(prompt_id, tokens)
    return model


def test_limit_is_expected_before_anything_was_seen() -> None:
    assert LengthModel().expect("a", 512) == 512


def test_unseen_prompt_is_expected_to_take_what_the_others_took() -> None:
    # (10 + 20 + 60) / 3 = 30, over responses and not over prompts.
    assert _model(a=[10, 20], b=[60]).expect("c", 512) == 30


def test_prompt_is_drawn_towards_the_mean_over_all() -> None:
    # The mean over all is (4 * 100 + 4 * 20) / 8 = 60, and weighs as 4 responses: (4 * 100 + 4 * 60) / 8 = 80.
    assert _model(a=[100] * 4, b=[20] * 4).expect("a", 512) == 80


def test_prompt_that_was_seen_often_is_expected_to_take_what_it_took() -> None:
    model = _model(a=[100] * 996, b=[20] * 996)
    # (996 * 100 + 4 * 60) / 1000 = 99.84
    assert model.expect("a", 512) == pytest.approx(99.84)


def test_expectation_is_never_above_the_limit() -> None:
    assert _model(a=[100, 300]).expect("a", 150) == 150


def test_disabled_model_expects_the_limit_and_keeps_nothing() -> None:
    model = LengthModel(enabled=False)
    model.observe("a", 10)
    assert model.expect("a", 512) == 512
    assert model.state_dict() == LengthModel().state_dict()


def test_state_goes_through_json_and_replaces_what_was_seen() -> None:
    state = json.loads(json.dumps(_model(a=[100] * 4, b=[20] * 4).state_dict()))
    restored = _model(z=[7])
    restored.load_state_dict(state)
    assert [restored.expect(prompt_id, 512) for prompt_id in ("a", "b", "z")] == [80, 40, 60]
    restored.observe("b", 60)  # (4 * 100 + 4 * 20 + 60) / 9 = 60 over all; (80 + 60 + 4 * 60) / 9 = 380 / 9
    assert restored.expect("b", 512) == pytest.approx(380 / 9)
