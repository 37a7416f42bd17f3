"""The fleet: who of the engines may serve, and what is done about the others.

The decisions are those of `rlhf.rollout.health`, a pure state machine; here are the probes, restarts and syncs that it
asks for. The pool is told which engines there are, and tells how requests end.

Invariants
- An engine is given requests only between a committed sync and the begin of the next. One that was started anew gets
  its sync at once and alone, and joins the others with the next one.
- A lost engine's work goes to the others at once. It is started again while it has restarts left, then it is retired.
- An engine that is stuck, in a sync or by its probes, is treated as lost, and nobody waits for it twice.
- The run goes on while an engine serves or is on its way to; when none is, everything that waits ends with the reason.
  A deterministic run needs all of them, since each has samples of its own.
- One sync at a time; a restart never disturbs one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.cluster.wait import wait
from rlhf.config.schema import Config
from rlhf.rollout.health import FleetHealth
from rlhf.rollout.pool import RolloutFailed, RolloutPool
from rlhf.tracking.spans import Span
from rlhf.weights.receipts import SyncFailed

if TYPE_CHECKING:
    from rlhf.weights.sync import SyncReport, WeightSync

log = logging.getLogger(__name__)

_DRAIN_S = 60.0


class EngineGroup(Protocol):
    """The engines' actor group, as far as the fleet needs it."""

    handles: list[Any]
    on_lost: Callable[[int, Any], None] | None

    def __len__(self) -> int: ...

    async def call_rank(self, rank: int, method: str, *args: Any, what: str, deadline_s: float) -> Any:
        """Call one engine and await it."""
        ...

    async def replace(self, rank: int) -> None:
        """End an engine's actor and start another in its place."""
        ...

    async def end(self, rank: int) -> None:
        """End an engine's actor and whatever it started."""
        ...


class Fleet:
    """All engines of a run. `start`, then `sync` before every step; `close` ends its own tasks, not the actors."""

    def __init__(
        self,
        group: EngineGroup,
        weights: WeightSync,
        pool: RolloutPool,
        config: Config,
        *,
        start_deadline_s: float,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._group = group
        self._weights = weights
        self._pool = pool
        self._rollout = config.rollout
        self._needs_every_engine = config.run.deterministic
        self._start_deadline_s = start_deadline_s
        self._say = say
        self.health = FleetHealth(len(group), max_restarts=config.fault_tolerance.max_restarts)
        self._reasons: dict[int, str] = {}
        self._lost = 0
        # Engines that `_recover` looks after.
        self._out: set[int] = set()
        self._workers: dict[int, int] = {}
        self._last: SyncReport
        self._one_at_a_time = asyncio.Lock()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def engines(self) -> range:
        """The indices of all engines, those that are lost included."""
        return range(len(self._group))

    async def start(self) -> None:
        """Start vLLM in every engine."""
        started = await asyncio.gather(*(self._start_vllm(engine) for engine in self.engines))
        self._workers = dict(zip(self.engines, started, strict=True))

    async def join(self) -> None:
        """Let all engines and the policy meet for syncs; from then on a lost engine no longer ends the run."""
        await self._weights.admit({engine: self._group.handles[engine] for engine in self.engines}, self._workers)
        self._group.on_lost = self.lose
        self._pool.on_outcome = self._outcome
        self._spawn(self._probe_forever())

    async def close(self) -> None:
        """End probes and restarts."""
        self._group.on_lost = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sync(self) -> SyncReport:
        """Bring the policy's weights to every engine that is alive, as one transaction.

        Engines that fail or are stuck are lost, and the others are synced without them. When none is left, it is the
        sync of the first engine that comes back. Raises `RolloutFailed` when none will, and what the sender raised.
        """
        async with self._one_at_a_time:
            while engines := [engine for engine in self.health.alive() if engine not in self._out]:
                report = await self._transaction(engines)
                if report is not None:
                    return report
        return await self._first_to_come_back()

    async def _transaction(self, engines: list[int]) -> SyncReport | None:
        """One sync of these engines; None when some of them failed it, and are out of it now."""
        for engine in engines:
            self._pool.close(engine)
            self.health.sync_begun(engine)
        try:
            report = await self._weights.sync(engines)
        except SyncFailed as error:
            for engine in engines:
                if engine not in error.engines:
                    self.health.sync_failed(engine)
            if not error.engines:
                raise
            for engine in sorted(error.engines):
                self.lose(engine, error)
            await self._weights.remove(error.engines, dead=error.engines)
            return None
        for engine in self.health.alive():
            if engine in engines:
                self.health.committed(engine)
                self._pool.open(engine, self._group.handles[engine])
        self._last = report
        self._news.set()
        return report

    async def _first_to_come_back(self) -> SyncReport:
        while not self.health.serving():
            if self.health.hopeless:
                raise self._nobody_left()
            self._news.clear()
            # A restart has deadlines of its own; here they are added up for one engine.
            await wait(self._news.wait(), what="an engine that serves", deadline_s=2 * self._start_deadline_s)
        return self._last

    # Losing engines, and getting them back

    def lose(self, engine: int, error: BaseException) -> None:
        """The engine died or is given up: its work goes elsewhere, and it is ended and started again, or retired."""
        self._reasons[engine] = str(error)
        if engine in self._out:
            return
        self._out.add(engine)
        if self.health.state(engine) != "dead":
            self.health.died(engine)
        self._lost += 1
        self._say(f"rollout engine {engine} is lost: {error}")
        self._pool.lose(engine, error)
        self._spawn(self._recover(engine))

    async def _recover(self, engine: int) -> None:
        while self.health.restart(engine) == "restarting":
            try:
                await self._bring_back(engine)
            except Exception as error:
                if self.health.state(engine) == "restarting":
                    self.health.start_failed(engine)
                else:
                    self.health.died(engine)
                self._reasons[engine] = str(error)
                self._say(f"rollout engine {engine} could not be started again: {error}")
            else:
                self._out.discard(engine)
                self._say(f"rollout engine {engine} serves again (restart {self.health.restarts(engine)})")
                return
        async with self._one_at_a_time:
            await self._weights.remove([engine], dead=[engine])
        await self._group.end(engine)
        self._say(f"rollout engine {engine} has no restart left; {len(self.health.alive())} engine(s) go on")
        if self.health.hopeless:
            self._pool.give_up(self._nobody_left())
        elif self._needs_every_engine:
            self._pool.give_up(self._one_is_missing(engine))
        self._news.set()

    async def _bring_back(self, engine: int) -> None:
        # Ended first: an engine that is stuck would keep its group, and whoever waits for it, waiting.
        await self._group.end(engine)
        async with self._one_at_a_time:
            await self._weights.remove([engine], dead=[engine])
        await self._group.replace(engine)
        self._workers[engine] = await self._start_vllm(engine)
        self.health.started(engine)
        async with self._one_at_a_time:
            await self._weights.admit({engine: self._group.handles[engine]}, {engine: self._workers[engine]})
            if await self._transaction([engine]) is None:
                raise RolloutFailed(f"rollout engine {engine} failed its first sync: {self._reasons[engine]}")

    def _one_is_missing(self, engine: int) -> RolloutFailed:
        return RolloutFailed(
            f"rollout: engine {engine} is lost, and with run.deterministic its samples are no other engine's: "
            f"{self._reasons[engine]}. Raise fault_tolerance.max_restarts to have it started again"
        )

    def _nobody_left(self) -> RolloutFailed:
        reasons = "\n".join(f"engine {engine}: {reason}" for engine, reason in sorted(self._reasons.items()))
        return RolloutFailed(f"rollout: no engine is left that could serve.\n{reasons}")

    # Probes

    def _outcome(self, engine: int, error: BaseException | None) -> None:
        """A request ended: with an answer, or failed by its engine."""
        if error is None:
            self.health.request_ok(engine)
            return
        self._suspect(engine, self.health.request_failed(engine), error)
        if self.health.state(engine) == "suspect":
            self._spawn(self._probe(engine))

    def _suspect(self, engine: int, state: str, error: BaseException) -> None:
        """Act on what the state machine made of a failure."""
        if state == "dead":
            self.lose(engine, error)
        elif state == "suspect":
            self._pool.close(engine)

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._rollout.probe_every_s)
            await asyncio.gather(*(self._probe(engine) for engine in self.health.alive()))

    async def _probe(self, engine: int) -> None:
        what, deadline_s = f"probe of rollout engine {engine}", self._rollout.probe_deadline_s
        handle, failure = self._group.handles[engine], None
        try:
            await wait(handle.probe.remote(), what=what, deadline_s=deadline_s)
        except Exception as error:
            failure = error
        if handle is not self._group.handles[engine]:
            return  # news of an engine that another has taken the place of
        if failure is not None:
            self._suspect(engine, self.health.probe_failed(engine), failure)
            return
        was_suspect = self.health.state(engine) == "suspect"
        if self.health.probe_ok(engine) == "healthy" and was_suspect:
            self._pool.open(engine, handle)

    async def drain_spans(self) -> list[Span]:
        """The engines' spans since the last call; those of a lost engine are lost."""
        calls = [
            self._group.call_rank(engine, "drain_spans", what="spans", deadline_s=_DRAIN_S)
            for engine in self.health.alive()
        ]
        drained = await asyncio.gather(*calls, return_exceptions=True)
        return [span for spans in drained if not isinstance(spans, BaseException) for span in spans]

    def state_dict(self) -> dict[str, int]:
        """The totals of the run so far; engines themselves have no state that outlives them."""
        return {"lost": self._lost, "retries": self._pool.retries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._lost, self._pool.retries = int(state["lost"]), int(state["retries"])

    def metrics(self) -> dict[str, float]:
        """`fleet/...`: engines that serve now, and engines lost and requests sent again over the run so far."""
        return {
            "fleet/serving": float(len(self.health.serving())),
            "fleet/lost": float(self._lost),
            "fleet/retries": float(self._pool.retries),
        }

    async def _start_vllm(self, engine: int) -> int:
        workers: int = await self._group.call_rank(
            engine, "start", what="start of vLLM", deadline_s=self._start_deadline_s
        )
        return workers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A fault of ours in looking after the fleet: what waits for it must not wait for ever.
            self._pool.give_up(task.exception() or RuntimeError())
            self._news.set()
