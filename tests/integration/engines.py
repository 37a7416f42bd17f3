"""A real engine in a Ray actor, and a plain model in the test's process that stands in for the learner as sender.

Only the learner is stood in for: vLLM, the transport, the receipts and the transaction are the product's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM

from rlhf.cluster.ports import free_port
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.types import Completion, EngineSpec, GenerationRequest, Sampling
from rlhf.trainers.parity import Parity, compare_logprobs
from rlhf.trajectories import Columns
from rlhf.weights.endpoint import Endpoint, JoinReport, SendReport
from rlhf.weights.gloo_sender import _Transfer
from rlhf.weights.sender import WeightSender
from rlhf.weights.sync import SyncReport, WeightSync

START_S, CALL_S = 300.0, 60.0
_numbers = itertools.count()


class Trainer:
    """A Hugging Face model with the learner's side of the sync, which stands in for the policy's actor group."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, bucket_bytes: int = 1 << 18) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.version = 0
        self.bucket_bytes = bucket_bytes
        self.sender = WeightSender(self, dtype, "gloo", bucket_bytes, rank=0)
        self.weights: Any = None

    def named_parameters_for_sync(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = list(self.model.named_parameters())
        if self.model.config.tie_word_embeddings:
            named.append(("lm_head.weight", self.model.get_input_embeddings().weight))
        return named

    def gather(self, parameters: Any) -> Any:
        return nullcontext()

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.detach()

    def join(self, engines: list[Any], **settings: Any) -> None:
        """Admit the engines (handles), numbered from 0, to syncs of this trainer's own; they stop serving."""
        ray.get([engine.begin_sync.remote("drain") for engine in engines], timeout=CALL_S)
        self.weights = weight_sync(self, self.bucket_bytes, **settings)
        asyncio.run(self.weights.admit(dict(enumerate(engines)), dict.fromkeys(range(len(engines)), 1)))

    async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        arguments = (*args, self.version) if method == "send_weights" else args
        name = {"join_transfer": "join", "leave_transfer": "leave", "send_weights": "send"}[method]
        return [await asyncio.to_thread(getattr(self.sender, name), *arguments)]

    def move(self, scale: float = 0.05) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)

    def logprobs(self, columns: Columns, temperature: float, never: Sequence[int] = ()) -> np.ndarray:
        """Log-probs in the records' convention: entry t belongs to token t. Ids in `never` could not be sampled."""
        ids = torch.from_numpy(columns.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(ids).logits.float()
            logits[..., list(never)] = -torch.inf
            scores = torch.log_softmax(logits / temperature, dim=-1)
        picked = scores[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        return np.concatenate([[np.nan], picked]).astype(np.float32)


@contextmanager
def at_bucket(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Within the block, `action()` is called when a sender in this process is about to send bucket `number`, from 0."""
    original, sent = _Transfer._send, 0

    def send(self: _Transfer, bucket: Any) -> None:
        nonlocal sent
        if sent == number:
            action()
        sent += 1
        original(self, bucket)

    _Transfer._send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Transfer._send = original  # type: ignore[method-assign]


class DoomedLearner:
    """A sender for a process of its own, which is killed in its third bucket."""

    def __init__(self, path: Path, bucket_bytes: int) -> None:
        self._sender = Trainer(path, bucket_bytes=bucket_bytes).sender

    def join_transfer(self, endpoint: Endpoint) -> JoinReport:
        return self._sender.join(endpoint)

    def leave_transfer(self, epoch: int) -> None:
        self._sender.leave(epoch)

    def send_weights(self, epochs: Sequence[int]) -> SendReport:
        with at_bucket(2, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            return self._sender.send(epochs, 40)


class Engine:
    """A started engine actor with plain synchronous calls for tests."""

    def __init__(self, path: Path, index: int = 0, *, wait: bool = True, num_gpus: int = 0, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "index": index,
            "model_path": str(path),
            "dtype": "float32",
            "device": "cpu",
            "tensor_parallel": 1,
            "max_model_len": 256,
            "kv_cache_bytes": 1 << 26,
            "gpu_memory_utilization": 0.5,
            "weight_backend": "gloo",
            "deterministic": False,
        }
        # vLLM's own binding of threads wants as many NUMA nodes as an engine has workers.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        actor = ray.remote(RolloutEngine).options(
            num_cpus=1, num_gpus=num_gpus, max_concurrency=1000, runtime_env={"env_vars": env}
        )
        self.handle = actor.remote(EngineSpec(**settings | changes))
        self._starting = self.handle.start.remote()
        if wait:
            self.started()

    def started(self) -> Engine:
        """This engine, when it is up; several start side by side."""
        ray.get(self._starting, timeout=START_S)
        return self

    def core_pid(self) -> int:
        """Process id of vLLM's EngineCore, asked of vLLM itself: process titles are not set everywhere."""
        ask = self.handle.__ray_call__.remote(
            lambda engine: engine._llm.engine_core.resources.engine_manager.processes[0].pid
        )
        return int(ray.get(ask, timeout=CALL_S))

    def generate(
        self,
        prompt: list[int],
        *,
        seed: int = 1,
        temperature: float = 1.0,
        new: int = 8,
        stop: tuple[str, ...] = (),
        top_k: int = -1,
        top_p: float = 1.0,
        min_new: int = 0,
    ) -> tuple[Completion, Columns]:
        sampling = Sampling(temperature, top_p, top_k, stop, new, min_new)
        request = GenerationRequest(f"test-{next(_numbers)}", tuple(prompt), sampling, seed)
        return tuple(ray.get(self.handle.generate.options(num_returns=2).remote(request), timeout=CALL_S))

    def parity(self, trainer: Trainer, prompt: list[int], *, temperature: float = 1.0) -> Parity:
        _, columns = self.generate(prompt, temperature=temperature)
        return compare_logprobs({"probe": columns}, {"probe": trainer.logprobs(columns, temperature)})


def weight_sync(policy: Any, bucket_bytes: int, **settings: Any) -> WeightSync:
    """The product's own transaction, for a policy whose rank 0 is on this machine."""

    async def address() -> tuple[str, int]:
        return "127.0.0.1", free_port()

    defaults: dict[str, Any] = {
        "transport": "gloo",
        "deadline_s": CALL_S,
        "group_size": 8,
        "pause": "drain",
        "learner_deadline_s": CALL_S,
    }
    return WeightSync(policy, address, bucket_bytes=bucket_bytes, **defaults | settings)


def sync(trainer: Trainer, version: int) -> SyncReport:
    """One whole sync of the trainer's weights, as that version, to all engines that it was joined with."""
    trainer.version = version
    return asyncio.run(trainer.weights.sync())
