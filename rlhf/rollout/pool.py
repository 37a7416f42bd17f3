"""The rollout pool: requests in, finished groups out.

Two layers. `generate` is one request, whatever engines it takes. `open_stream` draws on it for whole groups and yields
each as soon as its last sample is there. Which engine gets a request is the router's decision, which engines there are
the fleet's (`rlhf.rollout.fleet`); this is the shell that sends, waits and hands out.

Invariants
- Every request of a stream comes out once, in its own group, at its own place, whatever order engines finish in and
  whichever of them are lost on the way. An answer that comes after its request went elsewhere is dropped.
- A failure is the fleet's (the engine died, doesn't serve, didn't answer in time) or the sample's. The fleet's is
  retried, `attempts` times in all and on another engine where there is one; the sample's is raised or reported, by
  `on_error`.
- Every request has a deadline on every engine that has it. What is given up is aborted where it runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.cluster.wait import DeadlineExceeded, wait
from rlhf.rollout.activity import Activity
from rlhf.rollout.lengths import LengthModel
from rlhf.rollout.router import Assignment, Router
from rlhf.rollout.types import SLOTS_PER_ENGINE, Completion, GenerationRequest, SampleFault, Sampling, sample_seed
from rlhf.tracking.spans import now
from rlhf.trajectories import Group, PromptDraw, Trajectory


class RolloutFailed(RuntimeError):
    """A request was lost by as many engines as it may be sent to, or there is no engine left."""


@dataclass(slots=True)
class _Job:
    """A request in the pool, and where it is."""

    request: GenerationRequest
    prompt_id: str
    answer: asyncio.Future[tuple[Completion, Any]]
    task: asyncio.Task[None] | None = None


class RolloutPool:
    """Engines behind one interface: `open` and `lose` say which there are, `on_outcome` is told how requests end.

    `engines` are actor handles (or anything with the same methods) that serve from the start. With `static_engines`
    group g goes to engine g modulo that number and to no other, and all that an engine is given at a time begins
    together, in one order: for runs that repeat bit for bit.
    """

    def __init__(
        self,
        engines: Sequence[Any] = (),
        *,
        run_seed: int,
        deadline_s: float,
        slots: int = SLOTS_PER_ENGINE,
        attempts: int = 3,
        on_error: Literal["raise", "drop"] = "raise",
        static_engines: int | None = None,
    ) -> None:
        self._run_seed = run_seed
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._static_engines = static_engines
        # What begins together can't wait for free places; vLLM queues it.
        self._slots = slots = slots if static_engines is None else sys.maxsize
        self._on_error = on_error
        self._router = Router(slots=slots, attempts=attempts, deadline_s=deadline_s, clock=now)
        self.lengths = LengthModel(enabled=static_engines is None)
        self._handles: dict[int, Any] = {}
        self._jobs: dict[str, _Job] = {}
        self._hopeless: BaseException | None = None
        self._pumping = False
        self.on_outcome: Callable[[int, BaseException | None], None] = lambda engine, error: None
        self.activity = Activity()
        self.retries = 0
        for engine, handle in enumerate(engines):
            self._handles[engine] = handle
            self._router.open(engine)

    # What the fleet says

    def open(self, engine: int, handle: Any) -> None:
        """The engine serves from now on."""
        self._handles[engine] = handle
        self._router.open(engine)
        self._pump_soon()

    def close(self, engine: int) -> None:
        """The engine is given nothing new; what it has stays with it."""
        self._router.close(engine)

    def lose(self, engine: int, error: BaseException) -> None:
        """The engine is gone: what it had goes to others."""
        lost = self._router.lose(engine)
        for request_id in (*lost.retried, *lost.exhausted):
            self._take_back(self._jobs[request_id])
        self.retries += len(lost.retried)
        for request_id in lost.exhausted:
            self._fail(self._jobs[request_id], self._exhausted(request_id, error))
        self._pump_soon()

    def give_up(self, error: BaseException) -> None:
        """No engine will serve any more: every request ends with `error`, also those to come."""
        self._hopeless = error
        for job in list(self._jobs.values()):
            self._router.withdraw(job.request.request_id)
            self._take_back(job)
            self._fail(job, error)

    # One request

    async def generate(
        self, request: GenerationRequest, *, prompt_id: str = "", group: Any = None, engine: int | None = None
    ) -> tuple[Completion, Any]:
        """One response: its header, and the reference to its columns.

        Samples of one `group` stay together where that lets an engine share their prompt's KV. With `engine` the
        request waits for that one. Raises `SampleFault`, or `RolloutFailed` when engines failed it too often.
        """
        if self._hopeless is not None:
            raise self._hopeless
        request_id = request.request_id
        job = _Job(request, prompt_id, asyncio.get_running_loop().create_future())
        # Before the job is known: an id that is there already must not harm the one that has it.
        self._router.submit(
            request_id,
            group=request_id if group is None else group,
            prompt_tokens=len(request.prompt_ids),
            expected_tokens=self.lengths.expect(prompt_id, request.sampling.max_new_tokens),
            engine=engine,
        )
        self._jobs[request_id] = job
        patience = self._patience()
        self._pump_soon()
        try:
            return await wait(job.answer, what=f"rollout: request {request_id}", deadline_s=patience)
        finally:
            del self._jobs[request_id]
            had_by = self._router.withdraw(request_id)
            self._take_back(job)
            if had_by is not None:
                self._abort(had_by, request_id)
                self._pump_soon()

    def _patience(self) -> float:
        """How long a request that comes now may take: all attempts of the waves before it, and its own.

        A wave is as many requests as fit on the engines at a time; two are to spare, for an engine that starts anew.
        """
        capacity = self._slots * max(1, len(self._handles))
        waves = 2 + self._router.waiting // capacity
        return (waves + 2) * self._attempts * self._deadline_s

    def _pump_soon(self) -> None:
        """Dispatch once all that is happening now has happened: the router chooses best among all that waits."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send what the router finds a place for."""
        self._pumping = False
        assignments = self._router.dispatch()
        announced = self._announce(assignments) if self._static_engines is not None else {}
        for assignment in assignments:
            job = self._jobs[assignment.request_id]
            job.task = asyncio.ensure_future(self._attempt(job, assignment, announced.get(assignment.engine)))

    def _announce(self, assignments: Sequence[Assignment]) -> dict[int, asyncio.Future[None]]:
        """Tell each engine what it will have to begin together; by engine what to wait for before that is sent."""
        announced = dict[int, asyncio.Future[None]]()
        for engine in sorted({assignment.engine for assignment in assignments}):
            batch = [assignment.request_id for assignment in assignments if assignment.engine == engine]
            call = self._handles[engine].announce.remote(batch)
            what = f"rollout: {len(batch)} requests announced to engine {engine}"
            announced[engine] = asyncio.ensure_future(wait(call, what=what, deadline_s=self._deadline_s))
        return announced

    async def _attempt(self, job: _Job, assignment: Assignment, announced: asyncio.Future[None] | None) -> None:
        engine, request_id = assignment.engine, assignment.request_id
        what = f"rollout: request {request_id} on engine {engine}"
        # A moment later, so that by the router's clock the deadline has passed as well.
        deadline = asyncio.get_running_loop().call_later(self._deadline_s + 0.01, self._check_deadlines)
        self.activity.begin(engine)
        try:
            if announced is not None:
                await asyncio.shield(announced)  # others wait for it too
            header, columns = self._handles[engine].generate.options(num_returns=2).remote(job.request)
            # The router has the deadline; this one is for a header that comes and a wait that doesn't end.
            completion = await wait(header, what=what, deadline_s=2 * self._deadline_s)
        except Exception as error:
            self._failed(job, assignment, error)
        else:
            job.task = None
            self._router.finish(request_id)
            self.lengths.observe(job.prompt_id, completion.response_tokens)
            self.on_outcome(engine, None)
            job.answer.set_result((completion, columns))
            self._pump_soon()
        finally:
            deadline.cancel()
            self.activity.end(engine)

    def _failed(self, job: _Job, assignment: Assignment, error: Exception) -> None:
        engine, request_id = assignment.engine, assignment.request_id
        job.task = None
        fault = sample_fault(error)
        if fault is not None:
            self._router.finish(request_id)
            self.on_outcome(engine, None)
            self._fail(job, fault)
        elif self._router.retry(request_id):
            self.retries += 1
            self.on_outcome(engine, error)
        else:
            self._fail(job, self._exhausted(request_id, error))
            self.on_outcome(engine, error)
        self._pump_soon()

    def _check_deadlines(self) -> None:
        # Asked for anew each time: a failure can be the engine's last, and then it has none of the others any more.
        while overdue := self._router.overdue():
            assignment = overdue[0]
            job = self._jobs[assignment.request_id]
            what = f"rollout: request {assignment.request_id} on engine {assignment.engine}"
            self._take_back(job)
            self._abort(assignment.engine, assignment.request_id)
            self._failed(job, assignment, DeadlineExceeded(f"{what}: not done after {self._deadline_s:g} s"))

    def _exhausted(self, request_id: str, error: BaseException) -> RolloutFailed:
        failed = RolloutFailed(f"rollout: request {request_id} failed on {self._attempts} engine(s), the last: {error}")
        failed.__cause__ = error
        return failed

    def _abort(self, engine: int, request_id: str) -> None:
        """Nobody waits for it any more; an engine that can't be told has more to answer for than that."""
        handle = self._handles.get(engine)
        if handle is not None:
            handle.abort.remote(request_id)

    @staticmethod
    def _take_back(job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()
            job.task = None

    @staticmethod
    def _fail(job: _Job, error: BaseException) -> None:
        if not job.answer.done():
            job.answer.set_exception(error)

    # Groups

    def open_stream(self, samples: int, sampling: Sampling, *, purpose: str = "train") -> GroupStream:
        """A stream of groups of `samples` responses; what is added to it comes out as it is finished."""
        return GroupStream(lambda draw: self._group(draw, samples, sampling, purpose))

    async def stream(
        self, draws: Sequence[PromptDraw], samples: int, sampling: Sampling, *, purpose: str = "train"
    ) -> AsyncIterator[Group]:
        """Yield a group for each draw, in the order in which they finish."""
        stream = self.open_stream(samples, sampling, purpose=purpose)
        stream.add(draws)
        try:
            async for group in stream:
                yield group
        finally:
            await stream.close()

    async def _group(self, draw: PromptDraw, samples: int, sampling: Sampling, purpose: str) -> Group:
        pending = [asyncio.ensure_future(self._sample(draw, index, sampling, purpose)) for index in range(samples)]
        try:
            outcomes = await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        trajectories = tuple(outcome for outcome in outcomes if isinstance(outcome, Trajectory))
        failures = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
        return Group(draw, trajectories, failures)

    async def _sample(self, draw: PromptDraw, index: int, sampling: Sampling, purpose: str) -> Trajectory | str:
        """The sample's header, or what kept it from being generated."""
        request = GenerationRequest(
            request_id=f"{purpose}-{draw.draw_index}-{index}",
            prompt_ids=draw.prompt.token_ids,
            sampling=sampling,
            seed=sample_seed(self._run_seed, draw.draw_index, index, purpose),
        )
        engine = None if self._static_engines is None else draw.draw_index % self._static_engines
        try:
            completion, columns = await self.generate(
                request, prompt_id=draw.prompt.prompt_id, group=(purpose, draw.draw_index), engine=engine
            )
        except (SampleFault, RolloutFailed) as error:
            if self._on_error == "raise" or error is self._hopeless:
                raise
            return str(error)
        return Trajectory(
            prompt_id=draw.prompt.prompt_id,
            group_id=draw.draw_index,
            sample_index=index,
            prompt_tokens=len(draw.prompt.token_ids),
            response_tokens=completion.response_tokens,
            finish_reason=completion.finish_reason,
            weight_version=completion.weight_version,
            engine=completion.engine,
            columns=columns,
        )


class GroupStream:
    """Groups in the making: `add` draws, iterate over what is finished, `close` to give up the rest.

    The iteration ends when nothing is in the making; after another `add` it can be taken up again.
    """

    def __init__(self, make: Callable[[PromptDraw], Any]) -> None:
        self._make = make
        self._making: dict[asyncio.Future[Group], PromptDraw] = {}
        self._finished: asyncio.Queue[asyncio.Future[Group]] = asyncio.Queue()

    def add(self, draws: Sequence[PromptDraw]) -> None:
        """Begin these groups."""
        for draw in draws:
            task = asyncio.ensure_future(self._make(draw))
            self._making[task] = draw
            task.add_done_callback(self._finished.put_nowait)

    @property
    def pending(self) -> int:
        """Groups that are in the making, or finished and not handed out yet."""
        return len(self._making)

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> Group:
        if not self._making:
            raise StopAsyncIteration
        # What is in the making has deadlines of its own, so one of them ends.
        task = await self._finished.get()
        del self._making[task]
        return task.result()

    async def close(self) -> list[PromptDraw]:
        """Give up what isn't handed out yet; returns its draws, in their order."""
        rest, self._making = self._making, {}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return sorted(rest.values(), key=lambda draw: draw.draw_index)


def sample_fault(error: BaseException) -> SampleFault | None:
    """The sample's fault that an engine reported, possibly from another process; None where the fleet is at fault."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, SampleFault):
            return candidate
    return None
