"""The sample ledger: every sample that was drawn is in exactly one place (invariant 2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.trajectories import Ledger, LedgerError


def test_a_step_moves_every_sample_from_drawn_to_an_outcome() -> None:
    ledger = Ledger()
    ledger.draw(16)
    ledger.check()
    ledger.settle("failed", 1, source="in_flight")
    ledger.buffer(15)
    ledger.check()
    ledger.settle("trained", 8)
    ledger.settle("filtered", 4)
    ledger.settle("stale", 2)
    ledger.settle("discarded", 1)
    ledger.check()
    # 16 drawn = 8 trained + 4 filtered + 1 failed + 2 stale + 1 discarded, and nothing left in stock.
    assert ledger == Ledger(drawn=16, trained=8, filtered=4, failed=1, stale=2, discarded=1)


def test_lost_sample_is_an_error_that_lists_all_terms() -> None:
    # 8 drawn, 7 trained: one sample is nowhere.
    with pytest.raises(LedgerError, match=r"8 drawn but 7 accounted for.*trained 7.*in_flight 0"):
        Ledger(drawn=8, trained=7).check()


def test_sample_counted_twice_is_an_error() -> None:
    with pytest.raises(LedgerError, match="8 drawn but 9 accounted for"):
        Ledger(drawn=8, trained=8, failed=1).check()


def test_negative_stock_is_an_error_though_the_sum_is_right() -> None:
    # Settling from the wrong stock: 4 in flight stay there and `buffered` goes to -4; 4 = 4 + 4 - 4.
    ledger = Ledger()
    ledger.draw(4)
    ledger.settle("trained", 4)
    with pytest.raises(LedgerError, match="buffered -4"):
        ledger.check()


def test_metrics_are_totals_of_every_term() -> None:
    ledger = Ledger()
    ledger.draw(3)
    ledger.buffer(2)
    ledger.settle("trained", 1)
    assert ledger.metrics() == {
        "ledger/drawn": 3.0,
        "ledger/trained": 1.0,
        "ledger/filtered": 0.0,
        "ledger/failed": 0.0,
        "ledger/stale": 0.0,
        "ledger/discarded": 0.0,
        "ledger/buffered": 1.0,
        "ledger/redone": 0.0,
        "ledger/in_flight": 1.0,
    }


EVENTS = st.sampled_from(["draw", "buffer", "trained", "filtered", "failed", "stale", "discarded"])


@given(st.lists(st.tuples(EVENTS, st.integers(1, 8), st.booleans())))
def test_ledger_balances_after_any_sequence_of_legal_events(events: list[tuple[str, int, bool]]) -> None:
    ledger = Ledger()
    for event, wanted, from_flight in events:
        source = "in_flight" if from_flight or event == "buffer" else "buffered"
        samples = min(wanted, getattr(ledger, source))
        if event == "draw":
            ledger.draw(wanted)
        elif event == "buffer":
            ledger.buffer(samples)
        else:
            ledger.settle(event, samples, source=source)  # type: ignore[arg-type]
        ledger.check()


def test_samples_that_are_given_back_are_in_flight_again_and_the_balance_holds() -> None:
    ledger = Ledger()
    ledger.draw(4)
    ledger.buffer(4)
    ledger.give_back(3)
    ledger.settle("trained", 1)
    ledger.check()
    assert (ledger.in_flight, ledger.buffered) == (3, 0)


def test_a_rewind_counts_what_was_drawn_after_the_checkpoint_beside_the_balance() -> None:
    # The checkpoint has 40 drawn; 64 were by the last line, and 8 had been redone once before it: 8 + 24.
    ledger = Ledger(drawn=40, trained=40)
    ledger.rewound({"ledger/drawn": 64.0, "ledger/redone": 8.0})
    assert ledger.redone == 32
    ledger.check()


@pytest.mark.parametrize("last", [{}, {"ledger/drawn": 40.0}])
def test_a_rewind_that_loses_nothing_redoes_nothing(last: dict[str, float]) -> None:
    ledger = Ledger(drawn=40, trained=40)
    ledger.rewound(last)
    assert ledger.redone == 0


def test_a_state_that_is_loaded_goes_on_where_it_was_taken() -> None:
    ledger = Ledger(drawn=9, trained=5, failed=1, in_flight=3, redone=2)
    copy = Ledger()
    copy.load_state_dict(ledger.state_dict())
    assert copy == ledger
