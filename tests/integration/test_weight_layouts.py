"""Any layout of the policy to any layout of an engine: real learners, real vLLM, parity after two syncs each.

An engine serves several learners in turn, which are other layouts of the same model; the ranks' processes are kept.
The pairwise subset covers every pair of values of stage, ranks, tensor parallelism, architecture, tying and dtype.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from rlhf.batching import LearnerSample
from rlhf.cluster.ports import free_port
from rlhf.trainers.parity import compare_logprobs
from tests.integration.engines import CALL_S, Engine, weight_sync
from tests.integration.layout_ranks import BUCKET_BYTES, Layout, Rank
from tests.integration.learner_ranks import make_samples
from tests.tiny import make_tiny_model

PROMPTS = [[5, 76, 5, 84], [14, 15, 16, 17, 18, 19, 20], [40]]


@dataclass(frozen=True)
class Model:
    """What engine and policy have in common."""

    architecture: str
    tied: bool


@dataclass(frozen=True)
class Target:
    """An engine's layout."""

    model: Model
    tensor_parallel: int
    dtype: str


ARCHITECTURES, STAGES, RANKS = ("qwen2", "llama", "gemma3"), (1, 2, 3), (1, 2, 3)
EVERY_TARGET = [
    Target(Model(architecture, tied), tensor_parallel, dtype)
    for architecture, tied, tensor_parallel, dtype in itertools.product(
        ARCHITECTURES, (True, False), (1, 2), ("float32", "bfloat16")
    )
]
EVERY_LAYOUT = [Layout(stage, ranks) for stage, ranks in itertools.product(STAGES, RANKS)]
# Six engines, and for each the policies that send to it.
PAIRWISE: dict[Target, list[Layout]] = {
    Target(Model("qwen2", True), 1, "float32"): [Layout(3, 1), Layout(2, 2)],
    Target(Model("qwen2", False), 2, "bfloat16"): [Layout(3, 3), Layout(1, 3)],
    Target(Model("llama", True), 2, "float32"): [Layout(1, 3), Layout(2, 1)],
    Target(Model("llama", False), 1, "bfloat16"): [Layout(2, 1), Layout(3, 2)],
    Target(Model("gemma3", True), 2, "bfloat16"): [Layout(3, 1), Layout(1, 2)],
    Target(Model("gemma3", False), 1, "float32"): [Layout(2, 3), Layout(1, 1)],
}


def values(target: Target, layout: Layout) -> tuple[Any, ...]:
    model = target.model
    return (model.architecture, model.tied, target.tensor_parallel, target.dtype, layout.stage, layout.ranks)


def test_the_subset_has_every_pair_of_values():
    rows = [values(target, layout) for target, layouts in PAIRWISE.items() for layout in layouts]
    axes = [ARCHITECTURES, (True, False), (1, 2), ("float32", "bfloat16"), STAGES, RANKS]
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        missing = set(itertools.product(first, second)) - {(row[i], row[j]) for row in rows}
        assert not missing, (i, j, missing)


class Policy:
    """The ranks of one learner, as the transaction wants them."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks

    async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        return list(await asyncio.gather(*(rank.call.remote(method, *args) for rank in self._ranks)))

    def ask(self, method: str, *args: Any) -> list[Any]:
        return ray.get([rank.call.remote(method, *args) for rank in self._ranks], timeout=CALL_S)


@pytest.fixture(scope="module")
def processes(ray_cluster: None) -> dict[int, list[Any]]:
    """For each number of ranks the processes that are these ranks; a process group can't change its size."""
    actor = ray.remote(Rank).options(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    return {count: [actor.remote() for _ in range(count)] for count in RANKS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Model, Path]:
    """A folder for each model."""
    folder = tmp_path_factory.mktemp("layouts")
    return {
        Model(architecture, tied): make_tiny_model(  # type: ignore[arg-type]
            folder / f"{architecture}-{tied}", architecture=architecture, tied=tied
        )
        for architecture in ARCHITECTURES
        for tied in (True, False)
    }


def probe(engine: Engine, policy: Policy, dtype: str) -> None:
    """The product's parity between the engine and the policy, on responses to several prompts."""
    columns = {f"{i}-0": engine.generate(prompt, seed=i, new=12)[1] for i, prompt in enumerate(PROMPTS)}
    samples = [
        LearnerSample(name, index, len(found.token_ids), len(PROMPTS[index]), found)
        for index, (name, found) in enumerate(columns.items())
    ]
    scored: dict[str, np.ndarray] = {}
    for share in policy.ask("score", samples):
        scored |= share
    compare_logprobs(columns, scored).check(dtype)


def sync_twice(
    engine: Engine, target: Target, layout: Layout, ranks: Sequence[Any], model: Path, device: str = "cpu"
) -> None:
    """Two syncs of a policy in that layout, whose weights moved before each, with a probe after each."""
    port = free_port()
    begin = [rank.begin.remote(model, layout, r, port, target.dtype, device) for r, rank in enumerate(ranks)]
    ray.get(begin, timeout=CALL_S)
    policy = Policy(ranks)
    weights = weight_sync(policy, BUCKET_BYTES, transport="gloo" if device == "cpu" else "nccl")
    # An engine that served another policy before is in no sync of this one yet.
    ray.get(engine.handle.begin_sync.remote("drain"), timeout=CALL_S)
    asyncio.run(weights.admit({0: engine.handle}, {0: target.tensor_parallel}))
    for step in (1, 2):
        policy.ask("update", step, make_samples(step))
        assert asyncio.run(weights.sync()).version == step
        probe(engine, policy, target.dtype)


def engines(targets: Sequence[Target], models: dict[Model, Path]) -> Iterator[tuple[Target, Engine]]:
    """The engines one after the other, the next one starting while the last is in use."""
    starting: list[Engine] = []
    for index in range(len(targets) + 1):
        if index < len(targets):
            target = targets[index]
            starting.append(
                Engine(
                    models[target.model],
                    wait=False,
                    tensor_parallel=target.tensor_parallel,
                    dtype=target.dtype,
                    kv_cache_bytes=1 << 24,
                )
            )
        if index > 0:
            engine = starting[index - 1].started()
            yield targets[index - 1], engine
            ray.get(engine.handle.close.remote(), timeout=CALL_S)
            ray.kill(engine.handle)


def test_a_pairwise_subset_of_layouts_is_in_parity_after_two_syncs(processes, models):
    for target, engine in engines(list(PAIRWISE), models):
        for layout in PAIRWISE[target]:
            sync_twice(engine, target, layout, processes[layout.ranks], models[target.model])


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_every_layout_is_in_parity_after_two_syncs(processes, models):
    for target, engine in engines(EVERY_TARGET, models):
        for layout in EVERY_LAYOUT:
            sync_twice(engine, target, layout, processes[layout.ranks], models[target.model])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs two GPUs: scripts/gpu_check.sh runs it there")
@pytest.mark.parametrize("stage", [1, 3])
def test_nccl_is_in_parity_after_two_syncs(ray_cluster, models, stage):
    target = Target(Model("qwen2", True), 1, "bfloat16")
    model = models[target.model]
    rank = ray.remote(Rank).options(num_gpus=1).remote()
    engine = Engine(model, num_gpus=1, dtype=target.dtype, device="cuda", weight_backend="rlhf_nccl")
    sync_twice(engine, target, Layout(stage, 1), [rank], model, device="cuda")
    for handle in (engine.handle, rank):
        ray.kill(handle)
