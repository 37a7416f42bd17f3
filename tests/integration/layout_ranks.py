"""A process that is one rank of one learner after the other, for `test_weight_layouts.py`; Ray's workers import it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf.learners.policy import PolicyLearner
from rlhf.weights.sender import WeightSender
from tests.integration.learner_ranks import make_config

# Several buckets of the tiny model, its largest tensor not among the smaller ones.
BUCKET_BYTES = 1 << 18


@dataclass(frozen=True)
class Layout:
    """A policy's layout; it computes in float32."""

    stage: int
    ranks: int


class Rank:
    """A process that is one rank of one learner after the other."""

    learner: Any = None

    def begin(
        self, model: Path, layout: Layout, rank: int, port: int, wire_dtype: str, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        """Become a rank of a new learner, in the process group of the first one: DeepSpeed can't leave it."""
        if self.learner is not None:
            # Its buffers, 200 MB at stage 3, don't go with the last reference.
            self.learner.engine.destroy()
        policy = {"zero_stage": layout.stage, "ranks": layout.ranks, "learning_rate": 0.03}
        self.learner = PolicyLearner(make_config(model, policy=policy), rank, layout.ranks, device)
        self.learner.setup(("127.0.0.1", port))
        # A run has one dtype for both sides; here the wire's may differ, so that the cast is tried too.
        transport = "gloo" if device == "cpu" else "nccl"
        self.learner._sender = WeightSender(self.learner, getattr(torch, wire_dtype), transport, BUCKET_BYTES, rank)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the learner."""
        result = getattr(self.learner, method)(*args)
        return result[1] if method == "score" else result
