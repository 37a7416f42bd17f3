"""The weight of each token in the loss of an optimizer step, by numbers worked out by hand."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.aggregation import Aggregation, Totals, token_weight
from rlhf.config.schema import AlgorithmConfig

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
# Responses of 1 and 3 tokens, cap 5: N = 4, S = 2.
TOTALS = Totals.of([1, 3], 5)


def test_aggregations_are_those_of_the_configuration() -> None:
    assert set(AGGREGATIONS) == set(get_args(AlgorithmConfig.model_fields["aggregation"].annotation))


@pytest.mark.parametrize(
    ("aggregation", "short", "long", "loss"),
    [
        # Loss with token losses -1 (short) and +1 (long): sum of weight * loss.
        ("token_mean", 1 / 4, 1 / 4, 0.5),
        ("sequence_mean", 1 / 2, 1 / 2, 1.0),
        ("sequence_mean_token_mean", 1 / 2, 1 / 6, 0.0),
        ("constant", 1 / 10, 1 / 10, 0.2),
    ],
)
def test_weights_of_one_and_three_tokens(aggregation: Aggregation, short: float, long: float, loss: float) -> None:
    weights = [token_weight(aggregation, length, TOTALS) for length in (1, 3)]
    assert weights == pytest.approx([short, long])
    assert -1 * weights[0] + 3 * weights[1] == pytest.approx(loss)


def test_totals_count_tokens_and_sequences_that_have_any() -> None:
    assert Totals.of([0, 3, 2], 7) == Totals(tokens=5, sequences=2, max_new_tokens=7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_empty_response_has_no_weight_and_changes_none(aggregation: Aggregation) -> None:
    totals = Totals.of([0, 3], 4)
    assert token_weight(aggregation, 0, totals) == 0.0
    assert token_weight(aggregation, 0, Totals.of([0], 4)) == 0.0
    assert token_weight(aggregation, 3, totals) == token_weight(aggregation, 3, Totals.of([3], 4))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_mean_weights_sum_to_one(lengths: list[int]) -> None:
    totals = Totals.of(lengths, 50)
    for aggregation in ("token_mean", "sequence_mean_token_mean"):
        total = sum(n * token_weight(aggregation, n, totals) for n in lengths)
        assert total == pytest.approx(1.0)


def test_unknown_aggregation_is_an_error() -> None:
    with pytest.raises(ValueError, match="use token_mean"):
        token_weight("mean", 1, TOTALS)  # type: ignore[arg-type]
