"""The sample as learners and scorers get it: its lengths, and references to its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlhf.batching.plan import SampleLength
from rlhf.cluster.wait import get
from rlhf.trajectories import Columns

if TYPE_CHECKING:
    from ray import ObjectRef

# What a scorer returns: for each sample id a float32 array over the sample's T tokens, NaN where there is no response.
ScoredColumns = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LearnerSample:
    """One sample to train on or to score.

    `columns` is the data itself or a Ray reference to it. `scores` leads by name (`reference`, `old_logprobs`,
    `values`, `advantages`, `returns`) to a `ScoredColumns`, or a Ray reference to one, that holds this sample among
    others.
    """

    sample_id: str
    group_id: int
    total_tokens: int
    prompt_tokens: int
    columns: ObjectRef[Columns] | Columns
    scores: Mapping[str, ObjectRef[ScoredColumns] | ScoredColumns] = field(default_factory=dict)

    def with_scores(self, **scores: Any) -> LearnerSample:
        """The same sample with more scores; those that are None are left out."""
        found = {name: value for name, value in scores.items() if value is not None}
        return replace(self, scores={**self.scores, **found})

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return self.total_tokens - self.prompt_tokens

    @property
    def length(self) -> SampleLength:
        """What planning needs."""
        return SampleLength(self.sample_id, self.group_id, self.total_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class RewardedSample:
    """A sample with its reward as shaped; `baseline` is that of the greedy response to its prompt, if there is one."""

    sample: LearnerSample
    reward: float
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the driver reads of estimated advantages: metrics, and each sample's mean over its tokens, by sample id."""

    metrics: Mapping[str, float]
    advantages: Mapping[str, float]


def fetch_columns(samples: Sequence[LearnerSample], deadline_s: float) -> dict[str, Columns]:
    """Get the columns of these samples and check them against their headers; by sample id.

    Raises `DeadlineExceeded` after `deadline_s` seconds, and `ValueError` that names the sample whose columns have
    other lengths than its header says.
    """
    resolved = _resolve([sample.columns for sample in samples], Columns, "columns of samples", deadline_s)
    found: dict[str, Columns] = {}
    for sample, columns in zip(samples, resolved, strict=True):
        tokens, sampled = len(columns.token_ids), int(columns.loss_mask.sum())
        if tokens != sample.total_tokens or sampled != sample.response_tokens:
            raise ValueError(
                f"sample {sample.sample_id}: its header says {sample.total_tokens} tokens of which "
                f"{sample.response_tokens} were sampled, its columns hold {tokens} and {sampled}"
            )
        if columns.loss_mask[0]:
            raise ValueError(
                f"sample {sample.sample_id}: its first token is marked as sampled, and nothing predicts it"
            )
        found[sample.sample_id] = columns
    return found


def fetch_scores(samples: Sequence[LearnerSample], name: str, deadline_s: float) -> ScoredColumns | None:
    """Get the scores of that name for these samples, by sample id; None when no sample has any.

    Raises `ValueError` when only some samples have them, or one is missing in what its reference leads to.
    """
    without = [sample.sample_id for sample in samples if name not in sample.scores]
    if len(without) == len(samples):
        return None
    if without:
        raise ValueError(f"sample {without[0]} has no {name}, others of the batch have: score all or none")
    unique = {id(sample.scores[name]): sample.scores[name] for sample in samples}
    resolved = _resolve(list(unique.values()), Mapping, name, deadline_s)
    scored = dict(zip(unique, resolved, strict=True))
    found: ScoredColumns = {}
    for sample in samples:
        values = scored[id(sample.scores[name])].get(sample.sample_id)
        if values is None or len(values) != sample.total_tokens:
            held = "none" if values is None else str(len(values))
            raise ValueError(f"sample {sample.sample_id}: {held} {name} for {sample.total_tokens} tokens")
        found[sample.sample_id] = values
    return found


def _resolve(items: Sequence[Any], kind: type, what: str, deadline_s: float) -> list[Any]:
    """Replace the Ray references among `items` by what they lead to; the others are data already."""
    references = [item for item in items if not isinstance(item, kind)]
    arrived: Iterable[Any] = iter(get(references, what=what, deadline_s=deadline_s) if references else ())
    supply = iter(arrived)
    return [item if isinstance(item, kind) else next(supply) for item in items]
