"""Fleet health: the table in the module's docstring is what the code does, pair by pair, and what it leaves out."""

from __future__ import annotations

import pytest

from rlhf.rollout import health
from rlhf.rollout.health import STATES, FleetHealth, State

# A way of a new engine to each state, where both streaks end at 3 and there is one restart.
WAYS: dict[State, list[str]] = {
    "stale": [],
    "healthy": ["committed"],
    "suspect": ["committed", "probe_failed"],
    "dead": ["died"],
    "restarting": ["died", "restart"],
    "retired": ["died", "restart", "start_failed", "restart"],
}


def _fleet(engines: int = 1, *, way: list[str] | None = None) -> FleetHealth:
    fleet = FleetHealth(engines, max_restarts=1, probe_failures=3, request_failures=3)
    _send(fleet, *(way or []))
    return fleet


def _send(fleet: FleetHealth, *events: str, engine: int = 0) -> list[State]:
    return [getattr(fleet, event)(engine) for event in events]


def _table() -> dict[tuple[State, str], str]:
    """The docstring's table: (state, event) -> cell."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in (health.__doc__ or "").splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    assert sorted(header[1:]) == sorted(STATES)
    return {(state, row[0]): cell for row in body for state, cell in zip(header[1:], row[1:], strict=True)}  # type: ignore[misc]


TABLE = _table()


def test_table_has_every_event_of_the_class() -> None:
    queries = {"state", "restarts", "serving", "alive", "hopeless", "counts"}
    assert {event for _, event in TABLE} == {name for name in vars(FleetHealth) if not name.startswith("_")} - queries
    assert len(TABLE) == 6 * 11


@pytest.mark.parametrize(("state", "event"), TABLE, ids=str)
def test_event_leads_where_the_table_says(state: State, event: str) -> None:
    cell = TABLE[state, event]
    fleet = _fleet(way=WAYS[state])
    assert fleet.state(0) == state
    if cell == "!":
        with pytest.raises(ValueError, match=rf"engine 0 is {state}, where {event} can't be"):
            _send(fleet, event)
    else:
        assert _send(fleet, event) == [state if cell == "." else cell.split("/")[0]]
    assert fleet.state(0) == (state if cell in ("!", ".") else cell.split("/")[0])


@pytest.mark.parametrize("event", ["probe_failed", "request_failed"])
@pytest.mark.parametrize("state", ["healthy", "suspect", "stale"])
def test_streak_leads_to_the_cells_second_state_at_its_limit(state: State, event: str) -> None:
    before, at_limit = TABLE[state, event].split("/")
    way = WAYS[state]
    # The suspect has one failed probe behind it, so that its third is the second from here.
    needed = 3 - way.count(event)
    assert _send(_fleet(way=way), *[event] * needed) == [before] * (needed - 1) + [at_limit]


def test_restart_leads_to_the_cells_second_state_when_restarts_are_used_up() -> None:
    restarting, retired = TABLE["dead", "restart"].split("/")
    fleet = _fleet(way=["died"])
    assert _send(fleet, "restart", "started", "died", "restart") == [restarting, "stale", "dead", retired]
    assert fleet.restarts(0) == 1


# --- what is missing on purpose ---


@pytest.mark.parametrize("state", ["dead", "restarting"])
def test_new_process_cannot_become_healthy_without_having_been_started_and_synced(state: State) -> None:
    # It would answer with the weights it was started with, and its tokens would carry the version of the others'.
    for event in ("probe_ok", "request_ok"):
        assert _send(_fleet(way=WAYS[state]), event) == [state]
    with pytest.raises(ValueError, match=f"engine 0 is {state}, where committed can't be"):
        _send(_fleet(way=WAYS[state]), "committed")


def test_stale_engine_serves_after_a_commit_and_nothing_else() -> None:
    # It answers probes, and may even answer requests that it had before the sync; neither proves its weights.
    events = sorted({event for _, event in TABLE} - {"committed"})
    for event in events:
        fleet = _fleet()
        if TABLE["stale", event] != "!":
            _send(fleet, event)
        assert fleet.serving() == []
    assert _send(_fleet(), "committed") == ["healthy"]


def test_retired_engine_stays_retired() -> None:
    assert {TABLE["retired", event] for _, event in TABLE} == {"!", "."}


# --- streaks ---


def test_failed_probes_and_failed_requests_are_counted_apart() -> None:
    # Two of each are four failures, and neither streak is at 3.
    fleet = _fleet(way=["committed"])
    assert _send(fleet, *["probe_failed", "request_failed"] * 2) == ["suspect"] * 4


def test_answered_request_does_not_end_the_streak_of_probes() -> None:
    fleet = _fleet(way=["committed", "probe_failed", "probe_failed"])
    assert _send(fleet, "request_ok", "probe_failed") == ["suspect", "dead"]


def test_answered_probe_makes_a_suspect_healthy_but_does_not_end_the_streak_of_requests() -> None:
    fleet = _fleet(way=["committed", "request_failed", "request_failed"])
    assert _send(fleet, "probe_ok", "request_failed") == ["healthy", "dead"]


def test_streak_begins_anew_after_its_own_success() -> None:
    fleet = _fleet(way=["committed", "request_failed", "request_failed", "request_ok"])
    assert _send(fleet, "request_failed", "request_failed") == ["suspect", "suspect"]
    fleet = _fleet(way=["committed", "probe_failed", "probe_failed", "probe_ok"])
    assert _send(fleet, "probe_failed", "probe_failed") == ["suspect", "suspect"]


def test_new_process_is_not_held_to_what_the_old_one_did() -> None:
    fleet = _fleet(way=["committed", *["request_failed"] * 3, "restart", "started"])
    assert _send(fleet, "request_failed", "committed", "probe_failed") == ["stale", "healthy", "suspect"]


# --- the sync ---


def test_failed_probes_do_not_count_while_the_sync_is_in_progress() -> None:
    fleet = _fleet(way=["committed", "sync_begun"])
    assert _send(fleet, *["probe_failed"] * 9) == ["stale"] * 9
    assert _send(fleet, "committed", "probe_failed", "probe_failed") == ["healthy", "suspect", "suspect"]


def test_failed_probes_count_again_after_a_failed_sync() -> None:
    fleet = _fleet(way=["sync_begun", "sync_failed"])
    assert _send(fleet, *["probe_failed"] * 3) == ["stale", "stale", "dead"]


def test_engine_that_died_in_its_sync_is_probed_as_usual_in_its_next_life() -> None:
    fleet = _fleet(way=["sync_begun", "died", "restart", "started"])
    assert _send(fleet, *["probe_failed"] * 3) == ["stale", "stale", "dead"]


# --- queries ---


def test_queries_know_who_serves_who_can_be_synced_and_who_is_gone() -> None:
    fleet = _fleet(engines=6)
    for engine, state in enumerate(STATES):
        _send(fleet, *WAYS[state], engine=engine)
    assert [fleet.state(engine) for engine in range(6)] == list(STATES)
    assert fleet.serving() == [STATES.index("healthy")]
    assert fleet.alive() == sorted(STATES.index(state) for state in ("healthy", "suspect", "stale"))
    assert fleet.counts() == dict.fromkeys(STATES, 1)
    assert [fleet.restarts(engine) for engine in range(6)] == [int(s in ("restarting", "retired")) for s in STATES]


def test_fleet_is_hopeless_when_every_engine_is_retired_and_not_before() -> None:
    fleet = _fleet(engines=2)
    _send(fleet, *WAYS["retired"], engine=0)
    assert not fleet.hopeless
    _send(fleet, *WAYS["retired"][:-1], engine=1)
    assert not fleet.hopeless
    _send(fleet, "restart", engine=1)
    assert fleet.hopeless


@pytest.mark.parametrize("limits", [(0, 0, 1, 1), (1, -1, 1, 1), (1, 0, 0, 1), (1, 0, 1, 0)])
def test_limits_that_allow_nothing_are_refused(limits: tuple[int, int, int, int]) -> None:
    engines, max_restarts, probe_failures, request_failures = limits
    with pytest.raises(ValueError, match="at least 1"):
        FleetHealth(
            engines, max_restarts=max_restarts, probe_failures=probe_failures, request_failures=request_failures
        )
