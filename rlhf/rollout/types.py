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

# Log-probs asked for beyond top-k: on CPU vLLM keeps every token that ties with the k-th. bfloat16 logits between 16
# and 32 are 0.125 apart, so that a good part of k may tie where the vocabulary is large; too few are an error.
_MIN_TIES, _TIES_PER_K = 16, 0.5


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one response. Temperature 0 is greedy and only for evaluation."""

    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @staticmethod
    def for_training(config: Config) -> Sampling:
        """The run's one sampling specification (invariant 5)."""
        rollout, s = config.rollout, config.rollout.sampling
        return Sampling(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            stop=tuple(s.stop),
            max_new_tokens=rollout.max_new_tokens,
            min_new_tokens=rollout.min_new_tokens,
            stop_token_ids=tuple(s.stop_token_ids),
        )

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens the engine has to list, for the support of top-k and top-p to be known.

        0 without top-k, and at temperature 0, where nothing is replayed.
        """
        if self.top_k <= 0 or self.temperature == 0:
            return 0
        return self.top_k + max(_MIN_TIES, int(self.top_k * _TIES_PER_K))

    @property
    def masked(self) -> bool:
        """Whether some tokens can't be sampled, so that training has to replay which."""
        return self.candidates > 0 or (self.min_new_tokens > 0 and self.temperature > 0)

    def at_temperature(self, temperature: float) -> Sampling:
        """The same limits at another temperature."""
        return replace(self, temperature=temperature)

    def limited_to(self, max_new_tokens: int) -> Sampling:
        """The same distribution, with responses of at most `max_new_tokens`."""
        longest = min(max_new_tokens, self.max_new_tokens)
        # Up to its end such a response is sampled as before: no token that ends one before `min_new_tokens`.
        return replace(self, max_new_tokens=longest, min_new_tokens=min(longest, self.min_new_tokens))


class SampleFault(RuntimeError):
    """A request that no engine could answer: its own fault, and not that of the engine which says so."""


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
    """All that an engine needs to start, as plain data: it crosses a process border.

    `max_logprobs` is the most log-probs of likeliest tokens that a request may ask for (`Sampling.candidates`).
    """

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
    max_logprobs: int = 0

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
            max_logprobs=Sampling.for_training(config).candidates,
        )


def sample_seed(run_seed: int, draw_index: int, sample_index: int, purpose: str = "train") -> int:
    """Seed of one sample's stream: a function of these alone, so a restarted engine never replays a stream.

    `purpose` keeps the streams of the probe and of evaluations apart from those of training.
    """
    key = f"{run_seed}/{draw_index}/{sample_index}" + ("" if purpose == "train" else f"/{purpose}")
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    # vLLM takes seeds below 2^63.
    return int.from_bytes(digest, "little") >> 1
