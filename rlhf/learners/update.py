"""The update loop: a batch of samples becomes one or more optimizer steps.

Invariants
- The loss of an optimizer step is one weighted sum over all its tokens, with weights from `rlhf.algorithms.aggregation`
  that each rank computes from the headers of all samples.
- Old log-probs are those of the weights that the call started with: recomputed by a sweep when the call makes more
  than one optimizer step, and the current ones, detached, when it makes one.
- Code that may fail on one rank alone runs in `Ranks.together`, before each backward pass; after a failure, and when a
  gradient norm is not finite, gradients are discarded and the weights are as they were before that optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.algorithms.aggregation import Totals, token_weight
from rlhf.algorithms.kl import kl_per_token
from rlhf.algorithms.losses import ppo_token_loss, weighted_sum
from rlhf.batching import (
    LearnerSample,
    MicroBatch,
    Minibatch,
    Plan,
    ScoredColumns,
    fetch_columns,
    fetch_reference,
    plan,
)
from rlhf.config.schema import Config
from rlhf.learners.meter import TokenMeter
from rlhf.learners.ranks import LearnerError, Ranks
from rlhf.learners.schedule import learning_rate
from rlhf.learners.zero import ZeroEngine
from rlhf.models.batch import flatten, pad_batch, unflatten
from rlhf.tracking.spans import span
from rlhf.trajectories import Columns

# Enough to find the cause by; the rest is counted.
SAMPLES_NAMED = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a batch: headers of all samples, the plan, and data of its own samples."""

    samples: dict[str, LearnerSample]
    layout: Plan
    columns: dict[str, Columns]
    reference: ScoredColumns | None


class PolicyUpdate:
    """One rank's part of the updates. Every method is collective."""

    def __init__(self, config: Config, zero: ZeroEngine, ranks: Ranks) -> None:
        self._config = config
        self._zero = zero
        self._ranks = ranks

    def run(self, step: int, samples: Sequence[LearnerSample]) -> dict[str, float]:
        """Train on `samples` for the configured epochs and minibatches; return the metrics, equal on all ranks."""
        if not samples:
            raise ValueError(f"step {step} has no samples to train on: a step without any is to be skipped")
        policy = self._config.policy
        with span("policy/fetch", step):
            shard = self.shard(samples, policy.minibatches)
        minibatches = shard.layout.minibatches
        updates = policy.epochs * len(minibatches)
        rate = learning_rate(policy, step, self._config.run.steps)
        meter = _meter(samples)
        old: list[list[Tensor]] | None = None
        if updates > 1:
            with span("policy/old_logprobs", step):
                old = [self.sweep(minibatch, shard, meter) for minibatch in minibatches]
        loss, norms = 0.0, []
        for _ in range(policy.epochs):
            for index, minibatch in enumerate(minibatches):
                with span("policy/forward_backward", step):
                    loss += self.accumulate(minibatch, shard, meter, old[index] if old is not None else None)
                with span("policy/optimizer", step):
                    norms.append(self._apply(minibatch, rate))
        (total_loss,) = self._ranks.sum([loss])
        return {
            **meter.reduce(self._ranks),
            "policy/loss": total_loss / updates,
            "policy/grad_norm": sum(norms) / updates,
            "policy/learning_rate": rate,
        }

    def shard(self, samples: Sequence[LearnerSample], minibatches: int) -> Shard:
        """Plan the batch and fetch this rank's columns of it."""
        policy, deadline_s = self._config.policy, self._config.placement.deadline_s
        with self._ranks.together("fetching samples"):
            by_id = {sample.sample_id: sample for sample in samples}
            layout = plan(
                [sample.length for sample in samples],
                self._ranks.world_size,
                minibatches,
                policy.max_tokens_per_microbatch,
            )
            own = [by_id[i] for m in layout.minibatches for part in m.ranks[self._ranks.rank] for i in part.sample_ids]
            shard = Shard(by_id, layout, fetch_columns(own, deadline_s), fetch_reference(own, deadline_s))
        return shard

    def sweep(self, minibatch: Minibatch, shard: Shard, meter: TokenMeter | None = None) -> list[Tensor]:
        """Log-probs [N] of each of this rank's micro-batches under the current weights, without gradients.

        With a meter, they are compared with the engine's.
        """
        swept = []
        for micro_batch in minibatch.ranks[self._ranks.rank]:
            with self._ranks.together("computing log-probs"), torch.no_grad():
                rows = [shard.columns[i] for i in micro_batch.sample_ids]
                logprobs, _ = self._zero.forward(pad_batch(rows, self._zero.device))
                if meter is not None and rows:
                    _add_parity(meter, logprobs, rows)
                swept.append(logprobs)
        return swept

    def logprobs(self, samples: Sequence[LearnerSample]) -> ScoredColumns:
        """Log-probs of this rank's share of `samples`: float32 [T] by sample id, NaN where there is no response."""
        shard = self.shard(samples, minibatches=1)
        scored: ScoredColumns = {}
        for minibatch in shard.layout.minibatches:
            parts = minibatch.ranks[self._ranks.rank]
            for micro_batch, logprobs in zip(parts, self.sweep(minibatch, shard), strict=True):
                rows = [shard.columns[i] for i in micro_batch.sample_ids]
                if rows:
                    scored.update(zip(micro_batch.sample_ids, unflatten(rows, logprobs), strict=True))
        return scored

    def accumulate(
        self, minibatch: Minibatch, shard: Shard, meter: TokenMeter, old: Sequence[Tensor] | None = None
    ) -> float:
        """Accumulate the gradient of one optimizer step; return this rank's part of the step's loss."""
        lengths = [shard.samples[i].response_tokens for i in minibatch.sample_ids]
        totals = Totals.of(lengths, self._config.rollout.max_new_tokens)
        parts = minibatch.ranks[self._ranks.rank]
        total = 0.0
        for index, micro_batch in enumerate(parts):
            try:
                with self._ranks.together("computing the loss"):
                    loss = self._loss(micro_batch, shard, meter, totals, old[index] if old is not None else None)
            except LearnerError:
                self._zero.discard_gradients()
                raise
            self._zero.backward(loss, last=index == len(parts) - 1)
            total += float(loss.detach())
        return total

    def _loss(
        self, micro_batch: MicroBatch, shard: Shard, meter: TokenMeter, totals: Totals, old: Tensor | None
    ) -> Tensor:
        """This micro-batch's part of the step's loss, a float32 scalar."""
        algorithm, device = self._config.algorithm, self._zero.device
        ids = micro_batch.sample_ids
        samples, rows = [shard.samples[i] for i in ids], [shard.columns[i] for i in ids]
        logprobs, entropy = self._zero.forward(pad_batch(rows, device))
        if not rows:
            return logprobs.sum() * 0.0
        if old is None:
            old = logprobs.detach()
            _add_parity(meter, logprobs, rows)
        lengths = [sample.response_tokens for sample in samples]
        weights = [token_weight(algorithm.aggregation, length, totals) for length in lengths]
        result = ppo_token_loss(
            logprobs,
            old,
            _per_token([sample.advantage for sample in samples], lengths, device),
            algorithm.clip.low,
            algorithm.clip.high,
        )
        loss_N = result.loss
        if shard.reference is not None:
            reference_N = flatten(rows, [shard.reference[i] for i in ids], device)
            kl_N = kl_per_token(logprobs, reference_N, algorithm.kl.estimator)
            meter.add("policy/kl", kl_N)
            # A coefficient of 0 leaves the term out: 0 times a NaN would be a NaN.
            if algorithm.kl.where == "loss" and algorithm.kl.coefficient > 0:
                loss_N = loss_N + algorithm.kl.coefficient * kl_N
        meter.add("policy/entropy", entropy)
        meter.add("policy/update_kl", kl_per_token(old, logprobs, "k3"))
        meter.add("policy/clip_fraction", result.clipped.float())
        _check_finite(loss_N, ids, lengths)
        return weighted_sum(loss_N, _per_token(weights, lengths, device))

    def _apply(self, minibatch: Minibatch, rate: float) -> float:
        norm = self._zero.step(rate)
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm} and the optimizer step was not applied; "
                f"it was over {_named(minibatch.sample_ids)}"
            )
        return norm


def _meter(samples: Sequence[LearnerSample]) -> TokenMeter:
    """A meter for the names that this batch gives rise to; from headers, so the same on all ranks."""
    means = ["policy/entropy", "policy/update_kl", "policy/clip_fraction", "parity/mean_abs"]
    if any(sample.reference is not None for sample in samples):
        means.append("policy/kl")
    return TokenMeter(tuple(means), ("parity/max_abs",))


def _add_parity(meter: TokenMeter, logprobs_N: Tensor, rows: Sequence[Columns]) -> None:
    """Compare with the engine's log-probs of the same tokens."""
    difference = (logprobs_N.detach() - flatten(rows, [row.logprobs for row in rows], logprobs_N.device)).abs()
    meter.add("parity/mean_abs", difference)
    meter.add_maximum("parity/max_abs", difference)


def _per_token(values: Sequence[float], lengths: Sequence[int], device: torch.device) -> Tensor:
    """One value a sample, repeated for each of its response tokens: float32 [N]."""
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)


def _check_finite(loss_N: Tensor, ids: Sequence[str], lengths: Sequence[int]) -> None:
    finite = torch.isfinite(loss_N.detach()).cpu().numpy()
    if not finite.all():
        rows = np.repeat(np.arange(len(ids)), lengths)[~finite]
        raise ValueError(f"it is not finite for {_named([ids[row] for row in np.unique(rows)])}")


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - SAMPLES_NAMED} more" if len(ids) > SAMPLES_NAMED else ""
    return f"samples {', '.join(ids[:SAMPLES_NAMED])}{more}"
