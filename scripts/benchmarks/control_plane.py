"""Requests per second through the real rollout pool, against null engine actors: what the control plane can carry.

    python scripts/benchmarks/control_plane.py --engines 4 --requests 20000

The pool, its router and Ray are a run's own; only vLLM is left out. A null engine is an actor that answers each request
at once with a response of `--tokens` tokens: a header, and columns as they are. What is measured is all that lies
between a draw and its finished group: routing, one actor call a sample with two return values, and the group put
together. Generation takes far longer than this, so the figure bounds how many engines one driver can feed.

`requests_per_second` is the median over the rounds; the pool's own share is measured against engines in the driver's
process, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import finish, machine, markdown, say_machine, show, versions

from rlhf.rollout.pool import RolloutPool
from rlhf.rollout.types import Completion, GenerationRequest, Sampling
from rlhf.trajectories import Columns, Prompt, PromptDraw

_DEADLINE_S = 600.0
_PROMPT_TOKENS = 64


class NullEngine:
    """Answers at once."""

    def __init__(self, index: int) -> None:
        self.index = index

    async def generate(self, request: GenerationRequest) -> tuple[Completion, Columns]:
        """A response of as many tokens as were allowed."""
        tokens = request.sampling.max_new_tokens
        header = Completion(request.request_id, tokens, "length", 0, self.index)
        return header, Columns.from_completion(request.prompt_ids, [5] * tokens, [-1.0] * tokens, 0)

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""


class InProcess:
    """A null engine in the driver's own process, called as if it were an actor."""

    def __init__(self, index: int) -> None:
        self._engine = NullEngine(index)
        self.generate = self

    def options(self, num_returns: int) -> InProcess:
        """As an actor's method has them."""
        return self

    def remote(self, request: GenerationRequest) -> tuple[Any, None]:
        """The header alone; columns stay where they are."""
        return self._header(request), None

    async def _header(self, request: GenerationRequest) -> Completion:
        return (await self._engine.generate(request))[0]


async def rate(engines: Sequence[Any], arguments: argparse.Namespace, rounds: int) -> list[float]:
    """Requests per second of each round; one before the first warms up."""
    pool = RolloutPool(engines, run_seed=1, deadline_s=_DEADLINE_S)
    sampling = Sampling(1.0, 1.0, -1, (), arguments.tokens)
    groups = arguments.requests // arguments.samples
    rates = []
    for number in range(rounds + 1):
        first = number * groups
        prompt = tuple(range(_PROMPT_TOKENS))
        draws = [PromptDraw(Prompt(f"p{i}", "", prompt), i, 0) for i in range(first, first + groups)]
        began = time.perf_counter()
        answered = 0
        async for group in pool.stream(draws, arguments.samples, sampling):
            answered += len(group.trajectories)
        rates.append(answered / (time.perf_counter() - began))
        if answered != groups * arguments.samples:
            raise SystemExit(f"control_plane: {answered} answers to {groups * arguments.samples} requests")
    return rates[1:]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4, help="null engine actors (default 4)")
    parser.add_argument("--requests", type=int, default=8192, help="requests a round (default 8192)")
    parser.add_argument("--samples", type=int, default=8, help="requests a group (default 8)")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median is taken (default 5)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    arguments = parse(argv)
    where = machine()
    say_machine(where)
    import ray

    own = asyncio.run(rate([InProcess(i) for i in range(arguments.engines)], arguments, arguments.rounds))
    ray.init("local", num_cpus=arguments.engines, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(NullEngine)
        actors = [actor.options(num_cpus=1, max_concurrency=1000).remote(i) for i in range(arguments.engines)]
        through_ray = asyncio.run(rate(actors, arguments, arguments.rounds))
    finally:
        ray.shutdown()
    medians = {"requests_per_second": statistics.median(through_ray), "without_ray": statistics.median(own)}
    header = ["medians", "requests/s", "microseconds a request"]
    rows = [
        [name, f"{figure:.0f}", f"{1e6 / figure:.0f}"]
        for name, figure in (
            ("pool, Ray and null engines", medians["requests_per_second"]),
            ("pool alone", medians["without_ray"]),
        )
    ]
    batch = f"{arguments.requests} requests in groups of {arguments.samples}, {arguments.engines} engines"
    show(f"Control plane: {batch}, {arguments.tokens} tokens", header, rows)
    settings = {key: getattr(arguments, key) for key in ("engines", "requests", "samples", "tokens", "rounds")}
    figures = {"benchmark": "control_plane", **medians, "by_round": through_ray, **settings, "machine": where}
    finish({**figures, "versions": versions("ray")}, [markdown(header, rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
