"""The pool of killable worker processes that runs the reward functions.

Invariants
- Functions run in worker processes only: what hangs, crashes or is killed costs its own call and nothing else. A call
  whose worker a signal has killed is made once more, so that a kill from outside costs no reward.
- A worker runs one call at a time; calls wait in order for the next idle worker, and waiting isn't counted as running.
- Each call ends within its deadlines in a result for its function and group. Calls of different functions and groups
  never share anything but the queue, so their results can't be mixed up.
- `close` leaves no process behind, and neither does the death of the parent.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rlhf.config.schema import RewardConfig
from rlhf.rewards.combine import combine
from rlhf.rewards.process import BOOT_DEADLINE_S, REAP_DEADLINE_S, START_DEADLINE_S, WorkerProcess
from rlhf.rewards.resolve import function_keys, with_custom
from rlhf.rewards.types import RewardError, RewardInput, SampleScore
from rlhf.rewards.worker import CallResult, FunctionSpec


@dataclass(frozen=True, slots=True)
class _Call:
    function: int
    samples: Sequence[RewardInput]
    future: Future[CallResult]


class RewardPool:
    """Scores groups with the configured functions in `reward.workers` processes.

    `extra` holds functions handed in from Python, by name, as `dump_functions` gives them: they stand for the entries
    of that name, and those that no entry names are added with weight 1. Relative file names start at `base_dir`, which
    is also where the functions run. Use `start` before the first call, or as a context manager.
    """

    def __init__(
        self, config: RewardConfig, extra: Mapping[str, bytes] | None = None, base_dir: str | None = None
    ) -> None:
        extra, base_dir = extra or {}, base_dir or os.getcwd()
        functions = with_custom(config.functions, list(extra))
        self.keys = function_keys([function.name for function in functions])
        self._weights = [function.weight for function in functions]
        self._config = config
        specs = [
            FunctionSpec(key, function.name, function.options, base_dir, extra.get(function.name))
            for key, function in zip(self.keys, functions, strict=True)
        ]
        self._workers = [WorkerProcess(specs, base_dir) for _ in range(config.workers)]
        # Bounded by the groups that the driver has in flight; a limit here would block the actor's event loop.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self) -> None:
        """Boot all workers and wait until each has loaded every function; raises `RewardError` when one can't."""
        booted: list[Future[None]] = [Future() for _ in self._workers]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, future), name="reward-worker", daemon=True)
            for worker, future in zip(self._workers, booted, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in booted:
                future.result(BOOT_DEADLINE_S + START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """The processes that run now."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def score(
        self, samples: Sequence[RewardInput], *, prompt_id: str, sample_indices: Sequence[int] | None = None
    ) -> list[SampleScore]:
        """Score one group: every function is called once, with all its samples, and the scores keep their order.

        `prompt_id` and `sample_indices` name the samples in errors. Raises `RewardError` when a function failed and
        `reward.on_error` is `raise`.
        """
        if self._closed or not self._threads:
            raise RewardError("the reward pool is not running: call start() first, and score nothing after close()")
        calls = [_Call(index, samples, Future()) for index in range(len(self.keys))]
        for call in calls:
            self._calls.put(call)
        results = await asyncio.gather(*(asyncio.wrap_future(call.future) for call in calls))
        return combine(
            self.keys,
            self._weights,
            results,
            prompt_id=prompt_id,
            sample_indices=range(len(samples)) if sample_indices is None else sample_indices,
            on_error=self._config.on_error,
        )

    def _serve(self, worker: WorkerProcess, booted: Future[None]) -> None:
        """One thread for each worker: it starts the process and makes all calls to it."""
        try:
            worker.ensure_started()
        except BaseException as error:
            booted.set_exception(error)
            return
        booted.set_result(None)
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                result = worker.call(call.function, call.samples, self._config.timeout_s)
                if self._closed:  # then it was us who killed it
                    raise RewardError("the reward pool was closed before this group was scored")
                call.future.set_result(result)
            except BaseException as error:  # delivered to the one who waits for it
                call.future.set_exception(error)
        worker.end()

    def close(self) -> None:
        """End all workers at once, also those in the middle of a call; may be called twice."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(REAP_DEADLINE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
