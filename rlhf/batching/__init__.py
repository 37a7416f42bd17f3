"""Token-budget micro-batches, balanced over ranks, and the samples that go into them."""

from rlhf.batching.packing import CostModel, plan_packed
from rlhf.batching.plan import LongerSequences, MicroBatch, Minibatch, Plan, SampleLength, plan
from rlhf.batching.samples import (
    Estimates,
    LearnerSample,
    RewardedSample,
    ScoredColumns,
    fetch_columns,
    fetch_scores,
)

__all__ = [
    "CostModel",
    "Estimates",
    "LearnerSample",
    "LongerSequences",
    "MicroBatch",
    "Minibatch",
    "Plan",
    "RewardedSample",
    "SampleLength",
    "ScoredColumns",
    "fetch_columns",
    "fetch_scores",
    "plan",
    "plan_packed",
]
