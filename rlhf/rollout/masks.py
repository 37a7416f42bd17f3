"""From vLLM's log-probs of the likeliest tokens to the sampling mask: which ids could be sampled at each token.

vLLM's own `return_sampling_mask` does not run on CPU, so both devices use this: with processed log-probs a token that
top-k or top-p removed has log-prob -inf, and what is finite is the support.

Invariants (each has a test)
- The mask of a truncated distribution holds all of its support, or there is an error: its probabilities add up to 1.
- The sampled token is in its own mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf.trajectories import SamplingMask

# Rounding of float32 log-probs leaves some 1e-6. What could be missing unnoticed shifts a log-prob by this at most,
# which is what engine and trainer may differ by in float32 anyway.
_TOLERANCE = 1e-4


class IncompleteSupport(RuntimeError):
    """The engine did not list all the tokens that could be sampled."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probs of one response of R tokens, in nats, of the distribution that was sampled from.

    sampled_R float32: of the sampled tokens. candidate_ids_RC int32, candidate_logprobs_RC float32: the C likeliest
    tokens at each place, with -inf for those that could not be sampled; C is what the request asked for.
    """

    sampled_R: npt.NDArray[np.float32]
    candidate_ids_RC: npt.NDArray[np.int32]
    candidate_logprobs_RC: npt.NDArray[np.float32]

    @staticmethod
    def from_vllm(flat: Any, candidates: int) -> SampledLogprobs:
        """Read vLLM's `FlatLogprobs`: for each token the sampled one first, then the `candidates` likeliest."""
        columns = candidates + 1
        logprobs = np.array(flat.logprobs, dtype=np.float32).reshape(-1, columns)
        ids = np.array(flat.token_ids, dtype=np.int32).reshape(-1, columns)
        return SampledLogprobs(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])


def support_mask(request_id: str, sampled_ids: Sequence[int], logprobs: SampledLogprobs) -> SamplingMask:
    """The mask of a distribution that top-k or top-p truncated: the candidates with a finite log-prob are allowed.

    Raises `IncompleteSupport`, naming the request and the place, when the candidates don't hold all of the probability
    or not the sampled token: ties at the k-th place can keep more tokens than k, also more than were asked for.
    """
    possible_RC = np.isfinite(logprobs.candidate_logprobs_RC)
    total_R = np.exp(logprobs.candidate_logprobs_RC.astype(np.float64)).sum(axis=1)
    sampled_R = np.asarray(sampled_ids, dtype=np.int32)
    holds_sampled_R = ((logprobs.candidate_ids_RC == sampled_R[:, None]) & possible_RC).any(axis=1)
    # A NaN is not within the tolerance either.
    whole_R = (np.abs(total_R - 1.0) <= _TOLERANCE) & holds_sampled_R
    if not whole_R.all():
        place = int(np.argmin(whole_R))
        include = "include" if holds_sampled_R[place] else "do not include"
        raise IncompleteSupport(
            f"request {request_id}: the {logprobs.candidate_ids_RC.shape[1]} likeliest tokens at response token "
            f"{place} have probability {total_R[place]:.6f} together and {include} the sampled token "
            f"{sampled_R[place]}. Which tokens could be sampled is not known and can't be replayed in training. "
            "Many tokens may tie at the k-th place; a lower top_k makes that less likely."
        )
    offsets = np.concatenate([[0], np.cumsum(possible_RC.sum(axis=1))]).astype(np.int64)
    return SamplingMask(offsets, logprobs.candidate_ids_RC[possible_RC], allowed=True)


def early_stop_mask(response_tokens: int, min_new_tokens: int, stop_ids: Sequence[int]) -> SamplingMask:
    """The mask of `min_new_tokens` alone: `stop_ids` are not allowed at the first that many of R response tokens."""
    masked = min(response_tokens, min_new_tokens)
    offsets = np.minimum(np.arange(response_tokens + 1, dtype=np.int64), masked) * len(stop_ids)
    return SamplingMask(offsets, np.tile(np.array(stop_ids, dtype=np.int32), masked), allowed=False)
