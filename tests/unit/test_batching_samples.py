"""Fetching columns and reference log-probs: what is checked, and that errors name the sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf.batching import LearnerSample, fetch_columns, fetch_scores, samples
from rlhf.trajectories import Columns


@pytest.fixture(autouse=True)
def data_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that is here already needs no call to Ray, which would start a cluster."""
    monkeypatch.setattr(samples, "get", lambda references, **_: pytest.fail(f"waits for {references}"))


def sample(sample_id: str = "0-0", **changes: object) -> LearnerSample:
    columns = Columns.from_completion((5, 76), [84, 7, 2], [-1.0, -2.0, -3.0], 0)
    return replace(LearnerSample(sample_id, 0, 5, 2, columns), **changes)  # type: ignore[arg-type]


def test_columns_come_back_by_sample_id() -> None:
    found = fetch_columns([sample("0-0"), sample("0-1")], 1.0)
    assert list(found) == ["0-0", "0-1"]
    assert found["0-1"].token_ids.tolist() == [5, 76, 84, 7, 2]


def test_header_that_disagrees_with_columns_is_an_error_that_names_the_sample() -> None:
    with pytest.raises(ValueError, match=r"sample 0-1: its header says 6 tokens of which 4 were sampled, .* 5 and 3"):
        fetch_columns([sample(), sample("0-1", total_tokens=6)], 1.0)


def test_header_with_another_split_of_the_same_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"says 5 tokens of which 4 were sampled, its columns hold 5 and 3"):
        fetch_columns([sample(prompt_tokens=1)], 1.0)


def test_second_token_can_be_a_response_token() -> None:
    columns = Columns.from_completion((5,), [84, 7], [-1.0, -2.0], 0)
    assert fetch_columns([sample(total_tokens=3, prompt_tokens=1, columns=columns)], 1.0)["0-0"] is columns


def test_first_token_can_not_be_a_response_token() -> None:
    columns = Columns.from_completion((), [84, 7], [-1.0, -2.0], 0)
    with pytest.raises(ValueError, match="sample 0-0: its first token is marked as sampled"):
        fetch_columns([sample(total_tokens=2, prompt_tokens=0, columns=columns)], 1.0)


def test_batch_without_scores_of_a_name_has_none() -> None:
    assert fetch_scores([sample()], "reference", 1.0) is None
    assert fetch_scores([sample().with_scores(values={"0-0": np.zeros(5)})], "reference", 1.0) is None


def test_scores_are_picked_by_name_and_sample_id() -> None:
    scored = {"0-0": np.zeros(5, np.float32), "0-1": np.ones(5, np.float32)}
    other = {"0-0": np.full(5, 9.0), "0-1": np.full(5, 9.0)}
    batch = [sample(i).with_scores(reference=scored, values=other) for i in ("0-1", "0-0")]
    found = fetch_scores(batch, "reference", 1.0)
    assert found is not None
    assert found["0-1"].tolist() == [1.0] * 5


def test_scores_that_are_none_are_left_out() -> None:
    assert not sample().with_scores(reference=None).scores


def test_scores_of_some_samples_only_are_an_error() -> None:
    scored = {"0-0": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match="sample 0-1 has no reference, others of the batch have"):
        fetch_scores([sample().with_scores(reference=scored), sample("0-1")], "reference", 1.0)


@pytest.mark.parametrize(("scored", "held"), [({}, "none"), ({"0-0": np.zeros(4, np.float32)}, "4")])
def test_missing_or_short_scores_are_an_error(scored: dict[str, object], held: str) -> None:
    with pytest.raises(ValueError, match=rf"sample 0-0: {held} values for 5 tokens"):
        fetch_scores([sample().with_scores(values=scored)], "values", 1.0)


def test_references_are_fetched_in_one_call_with_the_deadline_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sample().columns
    store = {"columns a": data, "columns b": data, "scores": {"0-0": np.zeros(5), "0-1": np.ones(5)}}
    calls = []

    def get(references: list[str], *, what: str, deadline_s: float) -> list[object]:
        calls.append((references, what, deadline_s))
        return [store[reference] for reference in references]

    monkeypatch.setattr(samples, "get", get)
    batch = [
        sample("0-0", columns="columns a").with_scores(reference="scores"),
        sample("0-2").with_scores(reference={"0-2": np.full(5, 2.0)}),
        sample("0-1", columns="columns b").with_scores(reference="scores"),
    ]
    assert set(fetch_columns(batch, 3.0)) == {"0-0", "0-1", "0-2"}
    found = fetch_scores(batch, "reference", 3.0)
    assert found is not None
    assert [found[i][0] for i in ("0-0", "0-1", "0-2")] == [0.0, 1.0, 2.0]
    assert calls == [
        (["columns a", "columns b"], "columns of samples", 3.0),
        (["scores"], "reference", 3.0),
    ]
