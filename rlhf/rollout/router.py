"""Which request goes to which engine, and when: a pure state machine with an injected clock.

Invariants (each has a test)
- Conservation: a request that was submitted is waiting or with one engine until it is finished, withdrawn or exhausted,
  and it is told of once. None is lost, none is in two places.
- No engine holds more than `slots` requests, and a closed engine gets none.
- No slot of an open engine stays free over a `dispatch()` while a request waits.
- Order: retried requests first, then the longest expected response; samples of a group are neighbours, ties go by
  submission. A group ranks by what its first sample was expected to take.
- Load: a request is charged its prompt and its expected response, the prompt not where a sibling is outstanding on that
  engine and it fills a KV block. What was charged is given back, so that an empty engine has 0 tokens.
- Choice: the engine of its siblings, while that is at most one whole group ahead of the least loaded open engine with
  a free slot; else that least loaded one (ties: lowest index), which becomes the engine of the siblings.
- Spreading: while more open engines idle than other groups wait, it is the least loaded one, which becomes a further
  engine of the siblings; later samples take turns on these.
- A request that was submitted for one engine goes to that engine alone, in the order of submission.
- A retried request goes to another engine than the one that failed it, where one has a free slot.
- After `attempts` dispatches a request is not tried again.
- A decision costs O(log engines + log waiting): heaps whose outdated entries are dropped when they come up.

Submit what is known together before dispatching it: the order, and whether to spread, depend on what waits.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

# A shorter prompt fills no block of vLLM's KV cache (32 tokens, as we set it on CPU), and only whole blocks are shared.
SHARED_PROMPT_TOKENS = 32
# Expected lengths are rounded to multiples of 1/256: sums of those are exact in floats, so charging and giving back
# a million times leaves nothing behind.
_PER_TOKEN = 256
# Outdated entries that a heap may keep beside as many valid ones before it is rebuilt.
_SLACK = 64


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request given to an engine, for the `attempt`-th time (from 1)."""

    request_id: str
    engine: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lost:
    """What a lost engine had: requests that wait again, and those whose attempts are used up."""

    retried: tuple[str, ...]
    exhausted: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Engine:
    index: int
    open: bool = False
    idle: bool = False  # open and empty
    tokens: float = 0.0
    requests: dict[str, _Request] = field(default_factory=dict)
    version: int = 0  # an entry of the heap with another version is outdated


@dataclass(slots=True, eq=False)
class _Group:
    key: Hashable
    rank: tuple[float, int]  # minus the expected tokens of its first sample, and that sample's order
    tokens: float = 0.0  # of all its samples, the prompt once where it is shared
    members: int = 0
    waiting: int = 0
    homes: OrderedDict[int, _Engine] = field(default_factory=OrderedDict)  # where its samples go, the next one's first
    outstanding: dict[int, int] = field(default_factory=dict)  # engine -> samples


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    group: _Group
    order: int
    prompt_tokens: int
    expected_tokens: float
    pinned: int | None = None  # the only engine that it may go to
    waiting: bool = False
    attempts: int = 0
    engine: _Engine | None = None  # that has it, or had it last
    charge: float = 0.0
    dispatched_at: float = 0.0


class Router:
    """Requests in, assignments to engines out.

    `slots` is what one engine may hold, `attempts` how often a request is dispatched at most, `deadline_s` the seconds
    that an attempt may take by `clock`. Engines are known from their first `open`. Raises ValueError for limits below 1
    and deadlines that are not positive.
    """

    def __init__(self, *, slots: int, attempts: int, deadline_s: float, clock: Callable[[], float]) -> None:
        if slots < 1 or attempts < 1 or not deadline_s > 0:
            raise ValueError(
                f"slots {slots} and attempts {attempts} must be at least 1, deadline_s {deadline_s} above 0"
            )
        self._slots, self._attempts, self._deadline_s, self._clock = slots, attempts, deadline_s, clock
        self._requests: dict[str, _Request] = {}
        self._outstanding: OrderedDict[str, _Request] = OrderedDict()  # in order of dispatch
        self._groups: dict[Hashable, _Group] = {}
        self._engines: dict[int, _Engine] = {}
        self._queue: list[tuple[int, tuple[float, int], int, _Request]] = []
        self._pinned: dict[int, dict[int, _Request]] = {}  # engine -> order -> what waits for it
        self._free: list[tuple[float, int, int]] = []  # tokens, index, version of open engines with a free slot
        self._idle = 0
        self._waiting_groups = 0
        self._submitted = 0

    # --- engines ---

    def open(self, engine: int) -> None:
        """The engine may be given requests from now on."""
        known = self._engines.setdefault(engine, _Engine(engine))
        known.open = True
        self._engine_changed(known)

    def close(self, engine: int) -> None:
        """The engine gets no new requests; what it has stays with it."""
        if (known := self._engines.get(engine)) is not None:
            known.open = False
            self._engine_changed(known)

    def lose(self, engine: int) -> Lost:
        """Close the engine and take back what it had, in the order in which it got it."""
        self.close(engine)
        retried: list[str] = []
        exhausted: list[str] = []
        known = self._engines.get(engine)
        for request in list(known.requests.values()) if known else []:
            self._take_back(request)
            (retried if self._try_again(request) else exhausted).append(request.request_id)
        return Lost(tuple(retried), tuple(exhausted))

    # --- requests ---

    def submit(
        self,
        request_id: str,
        *,
        group: Hashable,
        prompt_tokens: int,
        expected_tokens: float,
        engine: int | None = None,
    ) -> None:
        """Queue a request; with `engine` it waits for that one. An expectation below one token counts as one.

        Raises ValueError when the id is known already, and for lengths that are negative or not finite.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id} was submitted already")
        if prompt_tokens < 0 or not 0 <= expected_tokens < math.inf:
            raise ValueError(f"request {request_id}: {prompt_tokens} prompt and {expected_tokens} expected tokens")
        expected = max(1.0, round(expected_tokens * _PER_TOKEN) / _PER_TOKEN)
        order = self._submitted
        self._submitted += 1
        siblings = self._groups.get(group)
        if siblings is None:
            siblings = self._groups[group] = _Group(group, rank=(-expected, order))
        shared = siblings.members > 0 and prompt_tokens >= SHARED_PROMPT_TOKENS
        siblings.tokens += expected if shared else prompt_tokens + expected
        siblings.members += 1
        request = _Request(request_id, siblings, order, prompt_tokens, expected, engine)
        self._requests[request_id] = request
        self._enqueue(request)

    def dispatch(self) -> list[Assignment]:
        """Give as many waiting requests to engines as fit now, and return them in that order."""
        assigned = self._dispatch_pinned()
        while (request := self._first_waiting()) is not None:
            least = self._least_loaded(request)
            if least is None:
                break
            engine = self._choose(request, least)
            heapq.heappop(self._queue)
            assigned.append(self._assign(request, engine))
        return assigned

    def _dispatch_pinned(self) -> list[Assignment]:
        """Give the engines what waits for them, in the order of submission."""
        assigned = []
        for index, waiting in self._pinned.items():
            engine = self._engines.get(index)
            for order in sorted(waiting):
                if engine is None or not self._has_room(engine):
                    break
                assigned.append(self._assign(waiting[order], engine))
        return assigned

    def finish(self, request_id: str) -> None:
        """The request was answered, or failed by its own fault: its slot is free and its id forgotten.

        Raises ValueError unless an engine has it.
        """
        request = self._with_engine(request_id)
        self._take_back(request)
        self._forget(request)

    def retry(self, request_id: str) -> bool:
        """The fleet failed the request: it waits again, first in line; False when its attempts are used up.

        Raises ValueError unless an engine has it.
        """
        request = self._with_engine(request_id)
        self._take_back(request)
        return self._try_again(request)

    def withdraw(self, request_id: str) -> int | None:
        """Forget a request that is wanted no more; returns the engine that has it, None if it waited or is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        engine = None
        if request.waiting:
            self._dequeue(request)
            self._drop_outdated_requests()
        else:
            assert request.engine is not None
            engine = request.engine.index
            self._take_back(request)
        self._forget(request)
        return engine

    def overdue(self) -> list[Assignment]:
        """What was dispatched at least `deadline_s` ago and is still out, oldest first."""
        now = self._clock()
        late = []
        for request in self._outstanding.values():
            if now - request.dispatched_at < self._deadline_s:
                break
            assert request.engine is not None
            late.append(Assignment(request.request_id, request.engine.index, request.attempts))
        return late

    @property
    def waiting(self) -> int:
        """Requests that are with no engine."""
        return len(self._requests) - len(self._outstanding)

    def outstanding(self, engine: int | None = None) -> int:
        """Requests that are with this engine, or with any."""
        if engine is None:
            return len(self._outstanding)
        return len(self._engines[engine].requests) if engine in self._engines else 0

    def tokens(self, engine: int) -> float:
        """Tokens charged to this engine."""
        return self._engines[engine].tokens if engine in self._engines else 0.0

    # --- the choice ---

    def _choose(self, request: _Request, least: _Engine) -> _Engine:
        homes = request.group.homes
        if least.idle and self._idle > self._waiting_groups - 1:  # the request's own group is among the waiting
            homes[least.index] = least
            return least
        if homes:
            home = next(iter(homes.values()))
            ahead = home.tokens - least.tokens
            if home is not request.engine and self._has_room(home) and ahead <= request.group.tokens:
                homes.move_to_end(home.index)
                return home
            homes.clear()
        homes[least.index] = least
        return least

    def _least_loaded(self, request: _Request) -> _Engine | None:
        """The least loaded engine with room; the one that failed the request only when there is no other."""
        first = self._first_free()
        if first is None or first is not request.engine:
            return first
        entry = heapq.heappop(self._free)
        second = self._first_free()
        heapq.heappush(self._free, entry)
        return second or first

    def _first_free(self) -> _Engine | None:
        while self._free:
            _, index, version = self._free[0]
            engine = self._engines[index]
            if engine.version == version:
                return engine
            heapq.heappop(self._free)
        return None

    def _has_room(self, engine: _Engine) -> bool:
        return engine.open and len(engine.requests) < self._slots

    def _engine_changed(self, engine: _Engine) -> None:
        """Put an engine whose load or door changed at its new place among the free ones."""
        idle = engine.open and not engine.requests
        self._idle += idle - engine.idle
        engine.idle = idle
        engine.version += 1
        if self._has_room(engine):
            heapq.heappush(self._free, (engine.tokens, engine.index, engine.version))
        if len(self._free) > 2 * len(self._engines) + _SLACK:
            self._free = [entry for entry in self._free if self._engines[entry[1]].version == entry[2]]
            heapq.heapify(self._free)

    # --- the queue ---

    def _first_waiting(self) -> _Request | None:
        while self._queue:
            request = self._queue[0][-1]
            if request.waiting:
                return request
            heapq.heappop(self._queue)
        return None

    def _enqueue(self, request: _Request) -> None:
        request.waiting = True
        if request.pinned is not None:
            self._pinned.setdefault(request.pinned, {})[request.order] = request
            return
        self._waiting_groups += request.group.waiting == 0
        request.group.waiting += 1
        fresh = 0 if request.attempts else 1
        heapq.heappush(self._queue, (fresh, request.group.rank, request.order, request))

    def _dequeue(self, request: _Request) -> None:
        """The request waits no more; its entry in the heap is removed by the caller, or outdated."""
        request.waiting = False
        if request.pinned is not None:
            del self._pinned[request.pinned][request.order]
            return
        request.group.waiting -= 1
        self._waiting_groups -= request.group.waiting == 0

    def _drop_outdated_requests(self) -> None:
        if len(self._queue) > 2 * self.waiting + _SLACK:
            self._queue = [entry for entry in self._queue if entry[-1].waiting]
            heapq.heapify(self._queue)

    # --- from queue to engine and back ---

    def _assign(self, request: _Request, engine: _Engine) -> Assignment:
        self._dequeue(request)
        siblings = request.group.outstanding
        shared = engine.index in siblings and request.prompt_tokens >= SHARED_PROMPT_TOKENS
        request.charge = request.expected_tokens if shared else request.prompt_tokens + request.expected_tokens
        request.engine = engine
        request.attempts += 1
        request.dispatched_at = self._clock()
        siblings[engine.index] = siblings.get(engine.index, 0) + 1
        engine.requests[request.request_id] = request
        engine.tokens += request.charge
        self._outstanding[request.request_id] = request
        self._engine_changed(engine)
        return Assignment(request.request_id, engine.index, request.attempts)

    def _take_back(self, request: _Request) -> None:
        engine, siblings = request.engine, request.group.outstanding
        assert engine is not None
        siblings[engine.index] -= 1
        if not siblings[engine.index]:
            del siblings[engine.index]
        del engine.requests[request.request_id]
        engine.tokens -= request.charge
        del self._outstanding[request.request_id]
        self._engine_changed(engine)

    def _try_again(self, request: _Request) -> bool:
        if request.attempts >= self._attempts:
            self._forget(request)
            return False
        self._enqueue(request)
        return True

    def _forget(self, request: _Request) -> None:
        del self._requests[request.request_id]
        request.group.members -= 1
        if not request.group.members:
            del self._groups[request.group.key]

    def _with_engine(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None or request.waiting:
            raise ValueError(f"request {request_id} is with no engine")
        return request
