"""The records that travel: what a prompt, a trajectory and a group are.

Invariants
- A header (`Trajectory`) is small and is all that the driver reads. Arrays (`Columns`) go from actor to actor.
- In every per-token array, index t belongs to `token_ids[t]`: `logprobs[t]` is log p(token_ids[t] | token_ids[:t]).
  There is no second convention; a consumer that predicts from position t - 1 does that shift itself.
- Positions that no model of ours sampled (the prompt) have `loss_mask` False, log-prob NaN and weight version -1,
  so that a value read by mistake poisons the result instead of passing for a number.
- The ids in `Columns` are the ids that the engine sampled; text is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ray import ObjectRef

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, ready for an engine.

    `prompt_id` is stable across runs and epochs. `text` is the user's prompt as reward functions see it, `token_ids`
    what the engine gets, `fields` the row's own fields (the answer among them).
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A prompt drawn from the sampler: `draw_index` counts draws over the run, from 0, and names the group."""

    prompt: Prompt
    draw_index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Which token ids an engine could sample at each of R response tokens, where it could not sample all of them.

    For token r the ids `token_ids[offsets[r]:offsets[r + 1]]` are the only ones that were allowed (`allowed` True:
    top-k and top-p), or the only ones that were not (`allowed` False: tokens that would end a response too early).
    offsets [R + 1] int64, token_ids int32.
    """

    offsets: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    allowed: bool


@dataclass(frozen=True, slots=True)
class Columns:
    """The arrays of one sample; T = prompt + response tokens.

    token_ids [T] int32; loss_mask [T] bool, True where the policy sampled the token; logprobs [T] float32, nats, of the
    distribution that was sampled from; weight_versions [T] int32, the version that produced each token; sampling_mask
    is None where every token could be sampled.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    sampling_mask: SamplingMask | None = None

    @staticmethod
    def from_completion(
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        response_logprobs: Sequence[float],
        weight_versions: Sequence[int] | int,
        sampling_mask: SamplingMask | None = None,
    ) -> Columns:
        """Columns of a single-turn sample: the prompt's positions masked, the response's as the engine gave them."""
        if len(response_ids) != len(response_logprobs):
            raise ValueError(f"{len(response_ids)} sampled ids but {len(response_logprobs)} log-probs")
        if not isinstance(weight_versions, int) and len(weight_versions) != len(response_ids):
            raise ValueError(f"{len(response_ids)} sampled ids but {len(weight_versions)} weight versions")
        prompt, total = len(prompt_ids), len(prompt_ids) + len(response_ids)
        mask = np.zeros(total, dtype=np.bool_)
        mask[prompt:] = True
        logprobs = np.full(total, np.nan, dtype=np.float32)
        logprobs[prompt:] = response_logprobs
        versions = np.full(total, -1, dtype=np.int32)
        versions[prompt:] = weight_versions
        ids = np.array([*prompt_ids, *response_ids], dtype=np.int32)
        return Columns(ids, mask, logprobs, versions, sampling_mask)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Header of one sample: what the driver decides with. `columns` is the reference to its arrays."""

    prompt_id: str
    group_id: int
    sample_index: int
    prompt_tokens: int
    response_tokens: int
    finish_reason: FinishReason
    weight_version: int
    engine: int
    columns: ObjectRef[Columns] | None = None
    reward: float | None = None
    rewards_by_function: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None

    @property
    def sample_id(self) -> str:
        """Unique over the run: the draw and the sample's place in its group."""
        return f"{self.group_id}-{self.sample_index}"

    @property
    def total_tokens(self) -> int:
        """Prompt and response tokens together."""
        return self.prompt_tokens + self.response_tokens

    def with_reward(self, reward: float | None, by_function: Mapping[str, float | None]) -> Trajectory:
        """The same sample, scored."""
        return replace(self, reward=reward, rewards_by_function=dict(by_function))

    def with_advantage(self, advantage: float) -> Trajectory:
        """The same sample, with the advantage that all its tokens share."""
        return replace(self, advantage=advantage)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one draw of a prompt. A group is an explicit id, never recovered by reshape (invariant 7).

    `failures` says of each sample that could not be generated why; there is no trajectory of it.
    """

    draw: PromptDraw
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str, ...] = ()

    @property
    def group_id(self) -> int:
        """The draw's index."""
        return self.draw.draw_index
