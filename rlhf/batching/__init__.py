"""Token-budget micro-batches, balanced over ranks, and the samples that go into them."""

from rlhf.batching.plan import MicroBatch, Minibatch, Plan, SampleLength, plan
from rlhf.batching.samples import LearnerSample, ScoredColumns, fetch_columns, fetch_reference

__all__ = [
    "LearnerSample",
    "MicroBatch",
    "Minibatch",
    "Plan",
    "SampleLength",
    "ScoredColumns",
    "fetch_columns",
    "fetch_reference",
    "plan",
]
