"""The update loop that all learners share: a batch of samples becomes one or more optimizer steps.

Invariants
- The loss of an optimizer step is one weighted sum over all its tokens, with weights that each rank computes from the
  headers of all samples (`rlhf.algorithms.aggregation`).
- Code that may fail on one rank alone, the user's included, runs in `Ranks.together`, before each backward pass; after
  a failure, and when a gradient norm is not finite, gradients are discarded and the weights are as they were before
  that optimizer step.
- Every rank meters the same names, so that they can be reduced together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhf.algorithms.aggregation import Totals
from rlhf.batching import LearnerSample, MicroBatch, Minibatch, ScoredColumns
from rlhf.config.schema import Config, LearnerConfig
from rlhf.learners.gauge import FORWARD_BACKWARD, OPTIMIZER, SCORE, Gauge
from rlhf.learners.meter import TokenMeter
from rlhf.learners.ranks import LearnerError, Ranks
from rlhf.learners.schedule import learning_rate
from rlhf.learners.shard import Shard, make_shard
from rlhf.learners.zero import ZeroEngine
from rlhf.models.arrangement import Batch
from rlhf.models.batch import unflatten
from rlhf.tracking.spans import now, span

# Enough to find the cause by; the rest is counted.
SAMPLES_NAMED = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """Where in a batch an optimizer update stands: its pass over the batch, and its number, both from 0."""

    epoch: int = 0
    update: int = 0


class UpdateLoop(ABC):
    """One rank's part of a learner's updates. Every method is collective."""

    role: ClassVar[str]
    # Scores that the loss reads, where the batch has them.
    reads: ClassVar[tuple[str, ...]]

    def __init__(self, config: Config, learner: LearnerConfig, steps: int, zero: ZeroEngine, ranks: Ranks) -> None:
        """`steps` is the length of the learning-rate schedule."""
        self._config = config
        self._learner = learner
        self._steps = steps
        self._zero = zero
        self._ranks = ranks
        self._gauge = Gauge(self.role, zero, ranks)

    @abstractmethod
    def predict(self, batch: Batch) -> Tensor:
        """What the model says of each response token, float32 [N]: its log-prob, or the value before it."""

    @abstractmethod
    def loss(self, micro_batch: MicroBatch, shard: Shard, meter: TokenMeter, totals: Totals, turn: Turn) -> Tensor:
        """This micro-batch's part of an optimizer step's loss, a float32 scalar."""

    @abstractmethod
    def meter(self, shard: Shard) -> TokenMeter:
        """A meter for the names that a batch gives rise to: the same on all ranks."""

    def summarise(self, reduced: dict[str, float]) -> dict[str, float]:
        """The batch's metrics from what was metered."""
        return reduced

    def run(self, step: int, samples: Sequence[LearnerSample]) -> dict[str, float]:
        """Train on `samples` for the configured epochs and minibatches; return the metrics, equal on all ranks."""
        if not samples:
            raise ValueError(f"step {step} has no samples to train on: a step without any is to be skipped")
        with span(f"{self.role}/fetch", step):
            shard = self.shard(samples, self._learner.minibatches)
        begin, rate = now(), learning_rate(self._learner, step, self._steps)
        meter = self.meter(shard)
        loss, norms = 0.0, list[float]()
        for epoch in range(self._learner.epochs):
            for minibatch in shard.layout.minibatches:
                with self._gauge.phase(FORWARD_BACKWARD, step):
                    loss += self.accumulate(minibatch, shard, meter, Turn(epoch, len(norms)))
                with self._gauge.phase(OPTIMIZER, step):
                    norms.append(self._apply(minibatch, rate))
        (total_loss,) = self._ranks.sum_of_shares([loss])
        return {
            **self.summarise(meter.reduce(self._ranks)),
            f"{self.role}/loss": total_loss / len(norms),
            f"{self.role}/grad_norm": sum(norms) / len(norms),
            f"{self.role}/learning_rate": rate,
            **self._gauge.read(shard.layout, self._learner.epochs, begin),
        }

    def shard(self, samples: Sequence[LearnerSample], minibatches: int) -> Shard:
        """Plan the batch and fetch this rank's part of it."""
        deadline_s = self._config.placement.deadline_s
        arrangement = self._zero.arrangement
        return make_shard(
            samples,
            self._learner,
            self._ranks,
            arrangement,
            minibatches=minibatches,
            names=self.reads,
            deadline_s=deadline_s,
        )

    def score(self, samples: Sequence[LearnerSample]) -> ScoredColumns:
        """What the model says of this rank's share of `samples` under the current weights, without gradients.

        float32 [T] by sample id, NaN where a token is not of the response. The ranks' shares make up the whole; of
        ranks with the same share one returns it, and the others nothing.
        """
        deadline_s = self._config.placement.deadline_s
        arrangement = self._zero.arrangement
        shard = make_shard(samples, self._learner, self._ranks, arrangement, minibatches=1, deadline_s=deadline_s)
        scored: ScoredColumns = {}
        rank = self._ranks.data_rank
        own = [micro_batch for minibatch in shard.layout.minibatches for micro_batch in minibatch.ranks[rank]]
        with self._gauge.peaks.phase(SCORE):
            for micro_batch in own:
                with self._ranks.together(f"{self.role} scores"), torch.no_grad():
                    rows = shard.rows(micro_batch)
                    predicted = self.predict(arrangement.batch(micro_batch, rows, self._zero.device))
                    if rows and self._ranks.answers:
                        scored.update(zip(micro_batch.sample_ids, unflatten(rows, predicted), strict=True))
        return scored

    def accumulate(self, minibatch: Minibatch, shard: Shard, meter: TokenMeter, turn: Turn) -> float:
        """Accumulate the gradient of one optimizer step; return this share's part of the step's loss."""
        lengths = [shard.samples[i].response_tokens for i in minibatch.sample_ids]
        totals = Totals.of(lengths, self._config.rollout.max_new_tokens)
        parts = minibatch.ranks[self._ranks.data_rank]
        total = 0.0
        for index, micro_batch in enumerate(parts):
            try:
                with self._ranks.together("computing the loss"):
                    loss = self.loss(micro_batch, shard, meter, totals, turn)
            except LearnerError:
                self._zero.discard_gradients()
                raise
            self._zero.backward(loss, last=index == len(parts) - 1)
            total += float(loss.detach())
        return total

    def _apply(self, minibatch: Minibatch, rate: float) -> float:
        norm = self._zero.step(rate)
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm} and the optimizer step was not applied; "
                f"it was over {named(minibatch.sample_ids)}"
            )
        return norm


def per_token(values: Sequence[float], lengths: Sequence[int], device: torch.device) -> Tensor:
    """One value a sample, repeated for each of its response tokens: float32 [N]."""
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)


def row_of_token(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The row of each response token: int64 [N]."""
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)


def check_finite(loss_N: Tensor, ids: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise `ValueError` that names the samples whose loss is not finite."""
    finite = torch.isfinite(loss_N.detach()).cpu().numpy()
    if not finite.all():
        rows = np.repeat(np.arange(len(ids)), lengths)[~finite]
        raise ValueError(f"it is not finite for {named([ids[row] for row in np.unique(rows)])}")


def named(ids: Sequence[str]) -> str:
    """Sample ids for a message."""
    more = f" and {len(ids) - SAMPLES_NAMED} more" if len(ids) > SAMPLES_NAMED else ""
    return f"samples {', '.join(ids[:SAMPLES_NAMED])}{more}"


def empty_loss(output: Any) -> Tensor:
    """The loss of a micro-batch without samples: a backward pass like any other that adds nothing."""
    loss: Tensor = output.sum() * 0.0
    return loss
