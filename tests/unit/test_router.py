"""Routing: the invariants of `rlhf/rollout/router.py`, each by an example and all of them against a scan."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhf.rollout.router import Assignment, Lost, Router


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _router(engines: Iterable[int] = (0, 1), slots: int = 8, attempts: int = 3, clock: Clock | None = None) -> Router:
    router = Router(slots=slots, attempts=attempts, deadline_s=30.0, clock=clock or Clock())
    for engine in engines:
        router.open(engine)
    return router


def _submit(router: Router, ids: str, *, group: object = None, prompt: int = 0, expected: float = 10.0) -> None:
    """Submit one request for each letter, all of one group, or each of its own."""
    for request_id in ids:
        router.submit(request_id, group=group or f"of {request_id}", prompt_tokens=prompt, expected_tokens=expected)


def _engines(assignments: list[Assignment]) -> dict[str, int]:
    return {assignment.request_id: assignment.engine for assignment in assignments}


def _order(assignments: list[Assignment]) -> str:
    return "".join(assignment.request_id for assignment in assignments)


# --- requests for one engine ---


def test_a_request_for_one_engine_waits_for_it_while_others_are_free() -> None:
    router = _router(engines=[0])
    for request_id, engine in (("a", 1), ("b", 0), ("c", 1)):
        router.submit(request_id, group=request_id, prompt_tokens=0, expected_tokens=10, engine=engine)
    assert _engines(router.dispatch()) == {"b": 0}
    router.open(1)
    assert _order(router.dispatch()) == "ac"
    # Lost and back again: they are still that engine's, in the same order.
    assert router.lose(1).retried == ("a", "c")
    assert router.dispatch() == []
    router.open(1)
    assert _engines(router.dispatch()) == {"a": 1, "c": 1}


# --- order ---


def test_longest_expected_response_goes_first_and_ties_go_by_submission() -> None:
    router = _router()
    _submit(router, "a", expected=10)
    _submit(router, "bc", expected=30)
    _submit(router, "d", expected=20)
    assert _order(router.dispatch()) == "bcda"


def test_samples_of_a_group_are_neighbours_however_they_were_submitted() -> None:
    router = _router()
    for request_id in "aAbBcC":
        _submit(router, request_id, group=request_id.islower())
    assert _order(router.dispatch()) == "abcABC"


def test_group_ranks_by_what_its_first_sample_was_expected_to_take() -> None:
    router = _router(engines=[])
    _submit(router, "a", group="g", expected=10)
    _submit(router, "b", expected=15)
    _submit(router, "c", group="g", expected=20)
    router.open(0)
    assert _order(router.dispatch()) == "bac"


def test_retried_request_is_first_in_line_whatever_its_length() -> None:
    router = _router(engines=[0], slots=1)
    _submit(router, "a", expected=10)
    assert _order(router.dispatch()) == "a"
    _submit(router, "b", expected=99)
    assert router.retry("a")
    assert _order(router.dispatch()) == "a"


# --- load and choice ---


def test_request_goes_to_the_engine_with_the_fewest_tokens_and_ties_to_the_lowest_index() -> None:
    router = _router(engines=[2, 0, 1])
    _submit(router, "a", prompt=10, expected=30)
    _submit(router, "b", prompt=10, expected=20)
    _submit(router, "c", prompt=10, expected=10)
    _submit(router, "d", prompt=10, expected=5)
    # a: 40 to 0, b: 30 to 1, c: 20 to 2, and d to 2, which has the least.
    assert _engines(router.dispatch()) == {"a": 0, "b": 1, "c": 2, "d": 2}
    assert [router.tokens(engine) for engine in (0, 1, 2)] == [40, 30, 35]


def test_free_slot_is_refilled_by_the_next_dispatch() -> None:
    router = _router(engines=[0, 1], slots=1)
    _submit(router, "abc")
    assert _engines(router.dispatch()) == {"a": 0, "b": 1}
    assert router.dispatch() == []
    router.finish("b")
    assert router.dispatch() == [Assignment("c", engine=1, attempt=1)]


def test_siblings_go_together_and_only_the_first_is_charged_the_prompt() -> None:
    router = _router()
    _submit(router, "abcd", group="g", prompt=32, expected=10)
    _submit(router, "efgh", group="h", prompt=32, expected=9)
    _submit(router, "ijkl", group="i", prompt=32, expected=8)
    assert _engines(router.dispatch()) == dict.fromkeys("abcd", 0) | dict.fromkeys("efghijkl", 1)
    # 32 + 4 * 10 = 72; 32 + 4 * 9 = 68, which is less, so the third group follows with 32 + 4 * 8 = 64.
    assert (router.tokens(0), router.tokens(1)) == (72, 132)


def test_prompt_shorter_than_a_block_is_charged_to_every_sibling() -> None:
    router = _router(engines=[0])
    _submit(router, "ab", group="g", prompt=31, expected=10)
    router.dispatch()
    assert router.tokens(0) == 2 * (31 + 10)


def test_prompt_is_charged_again_where_no_sibling_is_outstanding_any_more() -> None:
    router = _router(engines=[0], slots=1)
    _submit(router, "ab", group="g", prompt=50, expected=10)
    router.dispatch()
    router.finish("a")
    router.dispatch()
    assert router.tokens(0) == 50 + 10


def test_what_was_charged_is_given_back_to_the_last_bit() -> None:
    # In floats, (40.9 + 30.33 + 20.7 + 10.1) - 20.7 - 40.9 - 10.1 - 30.33 is not 0 but -4e-15.
    router = _router(engines=[0])
    for request_id, expected in {"a": 10.1, "b": 20.7, "c": 30 + 1 / 3, "d": 40.9}.items():
        _submit(router, request_id, expected=expected)
    router.dispatch()
    for request_id in "bdac":
        router.finish(request_id)
    assert router.tokens(0) == 0


def test_expectation_below_one_token_counts_as_one() -> None:
    router = _router(engines=[0])
    _submit(router, "a", expected=0)
    router.dispatch()
    assert router.tokens(0) == 1


@pytest.mark.parametrize(("others", "engine"), [(5, 0), (6, 1)])
def test_siblings_stay_together_until_their_engine_is_more_than_a_group_ahead(others: int, engine: int) -> None:
    router = _router(engines=[0])
    _submit(router, "a", group="g", prompt=32, expected=4)
    _submit(router, "x", expected=others)
    router.dispatch()
    router.open(1)
    _submit(router, "y", expected=1)
    router.dispatch()
    # Engine 0 has 32 + 4 + others, engine 1 has 1; the group of two is 32 + 2 * 4 = 40: 41 - 1 isn't more, 42 - 1 is.
    _submit(router, "b", group="g", prompt=32, expected=4)
    assert _engines(router.dispatch()) == {"b": engine}


def test_siblings_follow_the_one_that_had_to_move() -> None:
    router = _router(engines=[0], slots=3)
    _submit(router, "abcde", group="g", expected=50)
    assert _engines(router.dispatch()) == {"a": 0, "b": 0, "c": 0}
    router.open(1)
    router.open(2)
    _submit(router, "xy", expected=60)
    # x and y take the idle engines. Engine 0 is full, so d moves to engine 1; e follows, though engine 2 has less:
    # 60 + 50 is 50 ahead of 60, and the group is 250.
    assert _engines(router.dispatch()) == {"x": 1, "y": 2, "d": 1, "e": 1}


def test_group_spreads_over_idle_engines_where_no_other_group_needs_them() -> None:
    router = _router(engines=[0, 1, 2])
    _submit(router, "abcdefg", group="g", prompt=32, expected=10)
    # One on each idle engine; then they take turns.
    assert _engines(router.dispatch()) == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1, "f": 2, "g": 0}
    assert [router.tokens(engine) for engine in (0, 1, 2)] == [32 + 30, 32 + 20, 32 + 20]


def test_group_does_not_spread_over_engines_that_other_groups_wait_for() -> None:
    router = _router(engines=[0, 1, 2])
    _submit(router, "abc", group="g", expected=30)
    _submit(router, "def", group="h", expected=20)
    # a: 3 idle, 1 other group; b: 2 idle, 1 other; c: 1 idle is not more than 1 other, so it takes its turn on 0;
    # d: 1 idle, no other; e, f: none is idle.
    assert _engines(router.dispatch()) == {"a": 0, "b": 1, "c": 0, "d": 2, "e": 2, "f": 2}


# --- engines that open, close and are lost ---


def test_closed_engine_keeps_what_it_has_and_gets_nothing_new() -> None:
    router = _router()
    _submit(router, "ab")
    router.dispatch()
    router.close(0)
    router.close(0)
    _submit(router, "cd")
    assert _engines(router.dispatch()) == {"c": 1, "d": 1}
    assert (router.outstanding(0), router.outstanding(1), router.outstanding()) == (1, 3, 4)
    router.open(0)
    router.open(0)
    _submit(router, "e")
    assert _engines(router.dispatch()) == {"e": 0}


def test_nothing_is_dispatched_before_an_engine_opens() -> None:
    router = _router(engines=[])
    _submit(router, "ab")
    assert router.dispatch() == []
    assert (router.waiting, router.outstanding()) == (2, 0)


def test_lost_engine_gives_back_what_it_had_and_gets_nothing_until_it_opens() -> None:
    router = _router(engines=[0])
    _submit(router, "abc")
    router.dispatch()
    router.finish("b")
    assert router.lose(0) == Lost(retried=("a", "c"), exhausted=())
    assert (router.waiting, router.outstanding(0), router.tokens(0)) == (2, 0, 0)
    assert router.dispatch() == []
    assert router.lose(0) == Lost((), ())
    router.open(0)
    assert router.dispatch() == [Assignment("a", 0, attempt=2), Assignment("c", 0, attempt=2)]


def test_unknown_engine_holds_nothing_and_can_be_lost() -> None:
    router = _router()
    router.close(7)
    assert router.lose(7) == Lost((), ())
    assert (router.outstanding(7), router.tokens(7)) == (0, 0)


def test_lost_engine_exhausts_requests_that_were_on_their_last_attempt() -> None:
    router = _router(engines=[0], attempts=2)
    _submit(router, "a")
    router.dispatch()
    router.lose(0)
    router.open(0)
    _submit(router, "b")
    router.dispatch()
    assert router.lose(0) == Lost(retried=("b",), exhausted=("a",))
    assert router.waiting == 1


def test_retried_request_goes_to_another_engine_though_that_has_more_to_do() -> None:
    router = _router()
    _submit(router, "a", expected=5)
    _submit(router, "b", expected=50)
    assert _engines(router.dispatch()) == {"b": 0, "a": 1}
    router.retry("a")  # engine 1 is empty now, and failed it
    assert router.dispatch() == [Assignment("a", engine=0, attempt=2)]


def test_retried_request_stays_with_its_siblings_where_only_the_engine_that_failed_it_is_idle() -> None:
    router = _router(engines=[0])
    _submit(router, "a", group="g", expected=50)
    router.dispatch()
    router.close(0)
    router.open(1)
    _submit(router, "b", group="g", expected=50)
    router.dispatch()
    router.retry("a")
    router.dispatch()  # to engine 1, since engine 0 is closed
    router.open(2)
    _submit(router, "x", expected=20)
    assert _engines(router.dispatch()) == {"x": 2}
    router.open(0)
    _submit(router, "c", group="g", expected=50)
    assert _engines(router.dispatch()) == {"c": 0}  # the idle one
    router.retry("c")
    # Engine 0 is idle but failed it; engine 2 has the least, but engine 1, with 100 to 20, is the siblings' next.
    assert _engines(router.dispatch()) == {"c": 1}


def test_retried_request_returns_to_the_engine_that_failed_it_where_no_other_has_room() -> None:
    router = _router(slots=1)
    _submit(router, "ab")
    router.dispatch()
    router.retry("a")
    assert router.dispatch() == [Assignment("a", engine=0, attempt=2)]


def test_retry_is_refused_once_the_attempts_are_used_up() -> None:
    router = _router(attempts=2)
    _submit(router, "a")
    router.dispatch()
    assert router.retry("a")
    router.dispatch()
    assert not router.retry("a")
    assert (router.waiting, router.outstanding()) == (0, 0)
    _submit(router, "a")  # forgotten, so the id is free again, with all its attempts
    assert router.dispatch()[0].attempt == 1


# --- withdrawals, deadlines, mistakes ---


def test_withdrawn_request_is_named_with_its_engine_and_frees_its_slot() -> None:
    router = _router(engines=[3], slots=1)
    _submit(router, "abc")
    router.dispatch()
    assert router.withdraw("b") is None
    assert router.withdraw("a") == 3
    assert router.withdraw("a") is None
    assert _order(router.dispatch()) == "c"


def test_withdrawn_ids_leave_nothing_behind() -> None:
    # Short requests at the queue's end, withdrawn again and again while a longer one waits before them.
    router = _router(engines=[])
    _submit(router, "a", expected=99)
    for index in range(1000):
        router.submit(str(index), group=index, prompt_tokens=0, expected_tokens=1)
        router.withdraw(str(index))
    assert len(router._queue) <= 2 * 1 + 64 + 1
    assert len(router._groups) == len(router._requests) == 1


def test_outdated_loads_leave_nothing_behind() -> None:
    router = _router(engines=range(4))
    for index in range(1000):
        router.submit(str(index), group=index, prompt_tokens=0, expected_tokens=1 + index)
        router.dispatch()
        router.finish(str(index))
    assert len(router._free) <= 2 * 4 + 64


def test_attempt_is_overdue_from_its_deadline_on_and_until_it_is_dealt_with() -> None:
    clock = Clock()
    router = _router(clock=clock)
    _submit(router, "a")
    router.dispatch()
    clock.now += 10
    _submit(router, "b")
    router.dispatch()
    clock.now += 19.5
    assert router.overdue() == []
    clock.now += 0.5  # 30 s after a, 20 s after b
    assert router.overdue() == router.overdue() == [Assignment("a", engine=0, attempt=1)]
    router.retry("a")
    router.dispatch()  # its next attempt has a deadline of its own: 30 s from now
    clock.now += 10
    assert router.overdue() == [Assignment("b", engine=1, attempt=1)]


def test_waiting_is_never_overdue() -> None:
    clock = Clock()
    router = _router(engines=[], clock=clock)
    _submit(router, "a")
    clock.now += 1000
    assert router.overdue() == []


def test_id_is_refused_while_it_is_known() -> None:
    router = _router()
    _submit(router, "a")
    with pytest.raises(ValueError, match="request a was submitted already"):
        _submit(router, "a")
    router.dispatch()
    with pytest.raises(ValueError, match="request a was submitted already"):
        _submit(router, "a")
    router.finish("a")
    _submit(router, "a")


def test_answer_for_a_request_that_no_engine_has_is_a_mistake() -> None:
    router = _router()
    _submit(router, "a")
    with pytest.raises(ValueError, match="request a is with no engine"):
        router.finish("a")
    with pytest.raises(ValueError, match="request b is with no engine"):
        router.retry("b")


@pytest.mark.parametrize(("prompt", "expected"), [(-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_lengths_that_cannot_be_are_refused(prompt: int, expected: float) -> None:
    with pytest.raises(ValueError, match="request a: "):
        _submit(_router(), "a", prompt=prompt, expected=expected)


@pytest.mark.parametrize("limits", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, math.nan)])
def test_limits_that_allow_nothing_are_refused(limits: tuple[int, int, float]) -> None:
    slots, attempts, deadline_s = limits
    with pytest.raises(ValueError, match="at least 1"):
        Router(slots=slots, attempts=attempts, deadline_s=deadline_s, clock=Clock())


# --- all of it, against the same rules by a scan over everything ---

SLOTS, ATTEMPTS, DEADLINE_S, ENGINES = 3, 3, 30.0, 4


class _Sample:
    def __init__(self, name: str, group: _Siblings, order: int, expected: float, pinned: int | None) -> None:
        self.name, self.group, self.order, self.expected, self.pinned = name, group, order, expected, pinned
        self.attempts, self.since, self.charge = 0, 0.0, 0.0
        self.engine: int | None = None
        self.failed_on: int | None = None


class _Siblings:
    def __init__(self, prompt: int, rank: tuple[float, int]) -> None:
        self.prompt, self.rank = prompt, rank
        self.tokens, self.members = 0.0, 0
        self.turns: list[int] = []


class RouterAgainstScan(RuleBasedStateMachine):
    """Every dispatch is predicted by scanning all requests and all engines; every id has exactly one fate."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.router = Router(slots=SLOTS, attempts=ATTEMPTS, deadline_s=DEADLINE_S, clock=self.clock)
        self.opened: set[int] = set()
        self.samples: dict[str, _Sample] = {}
        self.groups: dict[int, _Siblings] = {}
        self.submitted, self.ended = 0, 0

    def _at(self, engine: int) -> list[_Sample]:
        return [sample for sample in self.samples.values() if sample.engine == engine]

    def _load(self, engine: int) -> float:
        return sum(sample.charge for sample in self._at(engine))

    def _waiting(self) -> list[_Sample]:
        return [sample for sample in self.samples.values() if sample.engine is None]

    def _out(self) -> list[str]:
        return sorted(sample.name for sample in self.samples.values() if sample.engine is not None)

    def _end(self, sample: _Sample) -> None:
        del self.samples[sample.name]
        self.ended += 1
        sample.group.members -= 1
        if not sample.group.members:
            self.groups = {key: group for key, group in self.groups.items() if group is not sample.group}

    def _fail(self, sample: _Sample) -> bool:
        sample.failed_on, sample.engine, sample.charge = sample.engine, None, 0.0
        if sample.attempts == ATTEMPTS:
            self._end(sample)
        return sample.name in self.samples

    def _predict(self) -> Assignment | None:
        """The next assignment by the rules, and its effect."""
        room = [engine for engine in sorted(self.opened) if len(self._at(engine)) < SLOTS]
        own = [sample for sample in self._waiting() if sample.pinned in room]
        if own:
            # Which engine's come first is of no consequence, since each has them in its own order.
            sample = min(own, key=lambda s: s.order)
            assert sample.pinned is not None
            return self._assign(sample, sample.pinned)
        waiting = [sample for sample in self._waiting() if sample.pinned is None]
        if not room or not waiting:
            return None
        sample = min(waiting, key=lambda s: (s.attempts == 0, s.group.rank, s.order))
        group = sample.group
        others = [engine for engine in room if engine != sample.failed_on] or room
        least = min(others, key=lambda engine: (self._load(engine), engine))
        idle = [engine for engine in self.opened if not self._at(engine)]
        if least in idle and len(idle) > len({id(s.group) for s in waiting} - {id(group)}):
            engine = least
            group.turns = group.turns if least in group.turns else [*group.turns, least]
        elif (
            group.turns
            and group.turns[0] in room
            and group.turns[0] != sample.failed_on
            and (self._load(group.turns[0]) - self._load(least) <= group.tokens)
        ):
            engine = group.turns[0]
            group.turns = [*group.turns[1:], engine]
        else:
            engine, group.turns = least, [least]
        return self._assign(sample, engine)

    def _assign(self, sample: _Sample, engine: int) -> Assignment:
        group = sample.group
        shared = group.prompt >= 32 and any(s.group is group for s in self._at(engine))
        sample.charge = sample.expected + (0 if shared else group.prompt)
        sample.engine, sample.since = engine, self.clock.now
        sample.attempts += 1
        return Assignment(sample.name, engine, sample.attempts)

    @rule(
        key=st.integers(0, 3),
        prompt=st.sampled_from([0, 31, 32, 64]),
        expected=st.sampled_from([1.0, 7.5, 20.0, 64.0]),
        count=st.integers(1, 5),
        pinned=st.sampled_from([None, None, None, *range(ENGINES)]),
    )
    def submit(self, key: int, prompt: int, expected: float, count: int, pinned: int | None) -> None:
        for _ in range(count):
            order, name = self.submitted, f"r{self.submitted}"
            self.submitted += 1
            group = self.groups.setdefault(key, _Siblings(prompt, (-expected, order)))
            group.tokens += expected + (0 if group.members and group.prompt >= 32 else group.prompt)
            group.members += 1
            self.samples[name] = _Sample(name, group, order, expected, pinned)
            self.router.submit(name, group=key, prompt_tokens=group.prompt, expected_tokens=expected, engine=pinned)

    @rule(engine=st.integers(0, ENGINES - 1))
    def open(self, engine: int) -> None:
        self.router.open(engine)
        self.opened.add(engine)

    @rule(engine=st.integers(0, ENGINES - 1))
    def close(self, engine: int) -> None:
        self.router.close(engine)
        self.opened.discard(engine)

    @rule(engine=st.integers(0, ENGINES - 1))
    def lose(self, engine: int) -> None:
        self.opened.discard(engine)
        had = self._at(engine)
        lost = self.router.lose(engine)
        again = [sample.name for sample in had if self._fail(sample)]
        assert sorted(lost.retried) == sorted(again)
        assert sorted(lost.retried + lost.exhausted) == sorted(sample.name for sample in had)

    @rule()
    def dispatch(self) -> None:
        assigned = self.router.dispatch()
        predicted = []
        while (assignment := self._predict()) is not None:
            predicted.append(assignment)
        assert len(assigned) == len(predicted)
        for engine in range(ENGINES):
            assert [a for a in assigned if a.engine == engine] == [a for a in predicted if a.engine == engine]

    @precondition(lambda self: self._out())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._out()))
        self.router.finish(name)
        self._end(self.samples[name])

    @precondition(lambda self: self._out())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._out()))
        assert self.router.retry(name) == self._fail(self.samples[name])

    @rule(number=st.integers(0, 40))
    def withdraw(self, number: int) -> None:
        sample = self.samples.get(f"r{number}")
        assert self.router.withdraw(f"r{number}") == (sample.engine if sample else None)
        if sample:
            self._end(sample)

    @rule(seconds=st.sampled_from([1.0, 10.0, DEADLINE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        late = {
            s.name for s in self.samples.values() if s.engine is not None and self.clock.now - s.since >= DEADLINE_S
        }
        assert {assignment.request_id for assignment in self.router.overdue()} == late

    @invariant()
    def conserved(self) -> None:
        assert self.router.waiting + self.router.outstanding() + self.ended == self.submitted
        assert self.router.waiting == len(self._waiting())

    @invariant()
    def loads_agree_and_no_engine_is_above_its_slots(self) -> None:
        for engine in range(ENGINES):
            assert self.router.outstanding(engine) == len(self._at(engine)) <= SLOTS
            assert self.router.tokens(engine) == self._load(engine)


TestRouterAgainstScan = RouterAgainstScan.TestCase
TestRouterAgainstScan.settings = settings(max_examples=150, stateful_step_count=40)
