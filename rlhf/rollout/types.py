"""What goes into a rollout engine and what comes out of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.trajectories import FinishReason

if TYPE_CHECKING:
    from rlhf.config.schema import Config


# The most sequences that one engine runs together; what comes beyond waits in the pool.
SLOTS_PER_ENGINE = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one response. Temperature 0 is greedy and only for evaluation."""

    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_new_tokens: int

    @staticmethod
    def for_training(config: Config) -> Sampling:
        """The run's one sampling specification (invariant 5)."""
        s = config.rollout.sampling
        return Sampling(s.temperature, s.top_p, s.top_k, tuple(s.stop), config.rollout.max_new_tokens)

    def at_temperature(self, temperature: float) -> Sampling:
        """The same limits at another temperature."""
        return replace(self, temperature=temperature)

    def limited_to(self, max_new_tokens: int) -> Sampling:
        """The same distribution, with responses of at most `max_new_tokens`."""
        return replace(self, max_new_tokens=min(max_new_tokens, self.max_new_tokens))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response wanted: `request_id` is unique over the run, `seed` the sample's own stream."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Header of a finished response. `weight_version` is the oldest version that produced any of its tokens."""

    request_id: str
    response_tokens: int
    finish_reason: FinishReason
    weight_version: int
    engine: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All that an engine needs to start, as plain data: it crosses a process border."""

    index: int
    model_path: str
    dtype: str
    device: str
    tensor_parallel: int
    max_model_len: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    weight_backend: str
    deterministic: bool
    load_dummy_weights: bool = True

    @staticmethod
    def from_config(config: Config, index: int, *, device: str, weight_backend: str) -> EngineSpec:
        """The spec of engine `index`. Engines start with dummy weights: the first sync has to bring all of them."""
        return EngineSpec(
            index=index,
            model_path=config.model.path,
            dtype=config.model.dtype,
            device=device,
            tensor_parallel=config.rollout.tensor_parallel,
            max_model_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            kv_cache_bytes=config.rollout.kv_cache_bytes,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            weight_backend=weight_backend,
            deterministic=config.run.deterministic,
        )


def sample_seed(run_seed: int, draw_index: int, sample_index: int, purpose: str = "train") -> int:
    """Seed of one sample's stream: a function of these alone, so a restarted engine never replays a stream.

    `purpose` keeps the streams of the probe and of evaluations apart from those of training.
    """
    key = f"{run_seed}/{draw_index}/{sample_index}" + ("" if purpose == "train" else f"/{purpose}")
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    # vLLM takes seeds below 2^63.
    return int.from_bytes(digest, "little") >> 1
