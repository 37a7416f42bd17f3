"""What reward functions get and give.

This module is imported by every worker process, so it needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.tracking.spans import Span
    from rlhf.trajectories import FinishReason


class RewardError(RuntimeError):
    """A reward function failed, and `reward.on_error` is `raise`; or no worker process could be started."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One sample, as a reward function sees it.

    `prompt` is the user's prompt as text. `response` is the decoded response with special tokens left out: no end or
    padding marker can reach a function, and neither can special tokens of your own (look for those in `response_ids`).
    `prompt_ids` and `response_ids` are the ids that the engine got and sampled; `fields` is the row of the data.
    """

    prompt: str
    response: str
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score with figures to log beside it; a score of None means that the function doesn't apply to the sample."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


RewardFunction = Callable[..., Sequence["float | RewardResult | None"]]


@dataclass(frozen=True, slots=True)
class SampleScore:
    """The outcome for one sample.

    `reward` is what trains: the weighted sum over the functions that apply, or what `reward.on_error` says when one
    failed (None: drop the sample). `error` is set for every failed sample, whatever the policy, so that it can be
    counted. `by_function` has each function's own score, None where it doesn't apply or failed. `metrics` are the
    figures of `RewardResult.metrics`, named `<function>/<metric>`.
    """

    reward: float | None
    by_function: Mapping[str, float | None]
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The scores of one group, in the order of its trajectories, and the spans recorded since the last result."""

    scores: list[SampleScore]
    spans: list[Span]
