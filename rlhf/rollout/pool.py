"""The rollout pool: requests in, finished groups out.

Two layers. `generate` is one request to one engine. `stream` draws on it for whole groups and yields each as soon as
its last sample is there; the synchronous step takes all of a step's groups from one stream.

Invariants
- Every request of a stream comes out once, in its own group, at its own place, whatever order engines finish in.
- At most `slots` requests are with an engine; the rest wait here, in the order of the draws.
- The first failure ends the stream; the requests that are still out are given up with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlhf.cluster.wait import wait
from rlhf.rollout.router import Router
from rlhf.rollout.types import SLOTS_PER_ENGINE, Completion, GenerationRequest, Sampling, sample_seed
from rlhf.trajectories import Group, PromptDraw, Trajectory


class RolloutPool:
    """N engines behind one interface. `engines` are actor handles (or anything with the same methods)."""

    def __init__(
        self, engines: Sequence[Any], *, run_seed: int, deadline_s: float, slots: int = SLOTS_PER_ENGINE
    ) -> None:
        self.engines = list(engines)
        self._run_seed = run_seed
        self._deadline_s = deadline_s
        self._router = Router(len(self.engines), slots)
        self._capacity = slots * len(self.engines)
        self._waiting = 0
        self._slot_freed = asyncio.Condition()

    async def generate(self, request: GenerationRequest) -> tuple[Completion, Any]:
        """One response: its header, and the reference to its columns. The deadline runs from the start of the call."""
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        engine = await self._acquire(request.request_id, tokens)
        try:
            header, columns = self.engines[engine].generate.options(num_returns=2).remote(request)
            what = f"rollout: request {request.request_id} on engine {engine}"
            return await wait(header, what=what, deadline_s=self._deadline_s), columns
        finally:
            self._router.release(request.request_id, engine)
            async with self._slot_freed:
                self._slot_freed.notify()

    async def _acquire(self, request_id: str, tokens: int) -> int:
        """Book the request with an engine, waiting for a slot where all are taken.

        Every holder of a slot has a deadline, so a wave of as many requests as there are slots takes at most that; the
        wait is as long as the waves before this request may take.
        """
        waves = 2 + self._waiting // self._capacity
        what = f"rollout: a free engine slot for request {request_id}"
        self._waiting += 1
        try:
            return await wait(self._free_slot(request_id, tokens), what=what, deadline_s=waves * self._deadline_s)
        finally:
            self._waiting -= 1

    async def _free_slot(self, request_id: str, tokens: int) -> int:
        async with self._slot_freed:
            while (engine := self._router.acquire(request_id, tokens)) is None:
                await self._slot_freed.wait()
        return engine

    async def stream(
        self, draws: Sequence[PromptDraw], samples: int, sampling: Sampling, *, purpose: str = "train"
    ) -> AsyncIterator[Group]:
        """Yield a group for each draw, in the order in which they finish."""
        groups = [asyncio.ensure_future(self._group(draw, samples, sampling, purpose)) for draw in draws]
        try:
            for finished in asyncio.as_completed(groups):
                yield await finished
        finally:
            for task in groups:
                task.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def _group(self, draw: PromptDraw, samples: int, sampling: Sampling, purpose: str) -> Group:
        pending = [asyncio.ensure_future(self._sample(draw, index, sampling, purpose)) for index in range(samples)]
        try:
            return Group(draw, tuple(await asyncio.gather(*pending)))
        finally:
            for task in pending:
                task.cancel()

    async def _sample(self, draw: PromptDraw, index: int, sampling: Sampling, purpose: str) -> Trajectory:
        request = GenerationRequest(
            request_id=f"{purpose}-{draw.draw_index}-{index}",
            prompt_ids=draw.prompt.token_ids,
            sampling=sampling,
            seed=sample_seed(self._run_seed, draw.draw_index, index, purpose),
        )
        completion, columns = await self.generate(request)
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
