"""Which engines may serve: a pure state machine. Probing, restarting and syncing are the caller's.

| event          | healthy      | suspect      | stale      | dead               | restarting | retired |
| -------------- | ------------ | ------------ | ---------- | ------------------ | ---------- | ------- |
| committed      | healthy      | healthy      | healthy    | !                  | !          | !       |
| sync_begun     | stale        | stale        | stale      | !                  | !          | !       |
| sync_failed    | stale        | stale        | stale      | !                  | !          | !       |
| probe_ok       | healthy      | healthy      | stale      | .                  | .          | .       |
| probe_failed   | suspect/dead | suspect/dead | stale/dead | .                  | .          | .       |
| request_ok     | healthy      | suspect      | stale      | .                  | .          | .       |
| request_failed | suspect/dead | suspect/dead | stale/dead | .                  | .          | .       |
| died           | dead         | dead         | dead       | .                  | .          | .       |
| restart        | !            | !            | !          | restarting/retired | !          | !       |
| started        | !            | !            | !          | !                  | stale      | !       |
| start_failed   | !            | !            | dead       | .                  | dead       | !       |

`a/b`: b where the limit is reached, a before. `!`: ValueError. `.`: late news of an engine that is gone; ignored.

Invariants (each has a test)
- Only a healthy engine serves, and only a commit makes one of an engine that is stale. There is no way from dead or
  restarting to healthy: a new process has the weights it started with, or none.
- Failed probes and failed requests are two streaks, each ended by its own success only; a new process begins both anew.
  One of a streak makes an engine suspect, the limit makes it dead. A stale one stays stale until then, since a probe
  that succeeds must not let it serve.
- While its sync is in progress an engine's failed probes don't count: loading weights keeps it from answering.
- An engine is restarted `max_restarts` times, whether or not it came up, and then retired for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

State = Literal["healthy", "suspect", "dead", "restarting", "stale", "retired"]
STATES: tuple[State, ...] = get_args(State)
_ALIVE: tuple[State, ...] = ("healthy", "suspect", "stale")


@dataclass(slots=True)
class _Engine:
    state: State = "stale"
    syncing: bool = False
    failed_probes: int = 0
    failed_requests: int = 0
    restarts: int = 0


class FleetHealth:
    """The state of every engine; all begin stale: started, without committed weights.

    `max_restarts` is per engine, `probe_failures` and `request_failures` are the streaks that make an engine dead. Each
    event returns the engine's new state, and raises ValueError where the table has `!`.
    """

    def __init__(self, engines: int, *, max_restarts: int, probe_failures: int = 3, request_failures: int = 3) -> None:
        if engines < 1 or max_restarts < 0 or probe_failures < 1 or request_failures < 1:
            raise ValueError(
                f"{engines} engines and streaks of {probe_failures} and {request_failures} must be at least 1, "
                f"max_restarts {max_restarts} at least 0"
            )
        self._engines = [_Engine() for _ in range(engines)]
        self._max_restarts = max_restarts
        self._probe_failures = probe_failures
        self._request_failures = request_failures

    # --- the sync ---

    def committed(self, engine: int) -> State:
        """The engine committed a sync: its weights are the current ones."""
        known = self._in(engine, "committed", _ALIVE)
        known.syncing = False
        known.state = "healthy"
        return known.state

    def sync_begun(self, engine: int) -> State:
        """New weights are on their way: until they are committed the engine's are neither the old nor the new ones."""
        known = self._in(engine, "sync_begun", _ALIVE)
        known.syncing = True
        known.state = "stale"
        return known.state

    def sync_failed(self, engine: int) -> State:
        """The sync was given up, at whatever point."""
        known = self._in(engine, "sync_failed", _ALIVE)
        known.syncing = False
        known.state = "stale"
        return known.state

    # --- what is heard of it; late news of an engine that is gone says nothing of the next process ---

    def probe_ok(self, engine: int) -> State:
        """The engine answered a probe in time."""
        known = self._engines[engine]
        if known.state in _ALIVE:
            known.failed_probes = 0
            if known.state == "suspect":
                known.state = "healthy"
        return known.state

    def probe_failed(self, engine: int) -> State:
        """A probe failed or timed out."""
        known = self._engines[engine]
        if known.state in _ALIVE and not known.syncing:
            known.failed_probes += 1
            self._doubt(known)
        return known.state

    def request_ok(self, engine: int) -> State:
        """The engine answered a request."""
        known = self._engines[engine]
        if known.state in _ALIVE:
            known.failed_requests = 0
        return known.state

    def request_failed(self, engine: int) -> State:
        """A request failed by the engine's fault, or passed its deadline there."""
        known = self._engines[engine]
        if known.state in _ALIVE:
            known.failed_requests += 1
            self._doubt(known)
        return known.state

    def died(self, engine: int) -> State:
        """The engine's process ended."""
        known = self._engines[engine]
        if known.state in _ALIVE:
            known.state = "dead"
        return known.state

    def _doubt(self, known: _Engine) -> None:
        if known.failed_probes >= self._probe_failures or known.failed_requests >= self._request_failures:
            known.state = "dead"
        elif known.state == "healthy":
            known.state = "suspect"

    # --- a new process ---

    def restart(self, engine: int) -> State:
        """Ask whether a dead engine gets a new process: restarting if it may, retired if its restarts are used up."""
        known = self._in(engine, "restart", ("dead",))
        if known.restarts >= self._max_restarts:
            known.state = "retired"
        else:
            known.restarts += 1
            known.state = "restarting"
        return known.state

    def started(self, engine: int) -> State:
        """The new process is up; it has no committed weights, and nothing is held against it."""
        known = self._in(engine, "started", ("restarting",))
        self._engines[engine] = _Engine(restarts=known.restarts)
        return self._engines[engine].state

    def start_failed(self, engine: int) -> State:
        """The new process did not come up, or did not live to its first commit."""
        known = self._in(engine, "start_failed", ("restarting", "stale", "dead"))
        known.state = "dead"
        return known.state

    def _in(self, engine: int, event: str, states: tuple[State, ...]) -> _Engine:
        known = self._engines[engine]
        if known.state not in states:
            raise ValueError(f"engine {engine} is {known.state}, where {event} can't be")
        return known

    # --- queries ---

    def state(self, engine: int) -> State:
        """The engine's state."""
        return self._engines[engine].state

    def restarts(self, engine: int) -> int:
        """How often the engine was restarted."""
        return self._engines[engine].restarts

    def serving(self) -> list[int]:
        """Engines that may be given requests."""
        return self._which("healthy")

    def alive(self) -> list[int]:
        """Engines that have a process, and so can take part in a sync."""
        return self._which(*_ALIVE)

    @property
    def hopeless(self) -> bool:
        """No engine serves and none ever will: all are retired."""
        return len(self._which("retired")) == len(self._engines)

    def counts(self) -> dict[State, int]:
        """How many engines are in each state."""
        return {state: len(self._which(state)) for state in STATES}

    def _which(self, *states: State) -> list[int]:
        return [index for index, known in enumerate(self._engines) if known.state in states]
