"""The policy's loss: surrogate, correction, KL and entropy, on the response tokens of a micro-batch.

Log-probs that ratios start from ("old") are those of the weights that the batch started with: computed before the
update where the driver asked for that, the engine's where the configuration says so, and otherwise the current ones,
detached, which is the same thing in a batch's only update.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.algorithms.aggregation import Totals, token_weight
from rlhf.algorithms.catalogue import loss_spec
from rlhf.algorithms.correction import correct, effective_sample_size, mismatch_kl
from rlhf.algorithms.kl import add_kl, kl_loss_per_token, kl_per_token
from rlhf.algorithms.losses import LossTokens, PolicyLoss, Surrogate, policy_loss, weighted_sum
from rlhf.batching import MicroBatch
from rlhf.config.schema import Config
from rlhf.learners.meter import TokenMeter
from rlhf.learners.ranks import Ranks
from rlhf.learners.shard import Shard
from rlhf.learners.update import Turn, UpdateLoop, check_finite, empty_loss, per_token, row_of_token
from rlhf.learners.zero import ZeroEngine
from rlhf.models.arrangement import Batch
from rlhf.models.batch import flatten


class PolicyUpdate(UpdateLoop):
    """The updates of the policy; `kl_coefficient` is set by the driver, whose controller may change it."""

    role = "policy"
    reads = ("advantages", "old_logprobs", "reference")

    def __init__(self, config: Config, zero: ZeroEngine, ranks: Ranks, surrogate: Surrogate | None = None) -> None:
        super().__init__(config, config.policy, config.run.steps, zero, ranks)
        self.kl_coefficient = config.algorithm.kl.coefficient
        self._surrogate = surrogate
        self._uses_ratio = loss_spec(config.algorithm.loss).uses_ratio
        corrected = config.algorithm.old_logprobs != "engine" and config.algorithm.correction.method != "none"
        self._correction = config.algorithm.correction if corrected else None

    def predict(self, batch: Batch) -> Tensor:
        logprobs: Tensor = self._forward(batch)[0]
        return logprobs

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N] at the sampling temperature."""
        outputs: tuple[Tensor, Tensor] = self._zero.forward(batch, self._config.rollout.sampling.temperature)
        return outputs

    def meter(self, shard: Shard) -> TokenMeter:
        means = ["policy/entropy", "policy/update_kl", "parity/mean_abs", "parity/kl"]
        if self._uses_ratio:
            means.append("policy/clip_fraction")
        if self._correction is not None:
            means += ["correction/weight_mean", "correction/weight_square", "correction/kept_fraction"]
        if shard.has("reference"):
            means.append("policy/kl")
        return TokenMeter(
            tuple(means), ("parity/max_abs", "policy/ratio_max") if self._uses_ratio else ("parity/max_abs",)
        )

    def summarise(self, reduced: dict[str, float]) -> dict[str, float]:
        square = reduced.pop("correction/weight_square", None)
        if square is not None:
            # Mean and mean of squares are sums over the same tokens, so their count cancels.
            size = effective_sample_size(reduced["correction/weight_mean"], square, 1)
            reduced.update({} if size is None else {"correction/effective_sample_size": size})
        return reduced

    def loss(self, micro_batch: MicroBatch, shard: Shard, meter: TokenMeter, totals: Totals, turn: Turn) -> Tensor:
        algorithm, device = self._config.algorithm, self._zero.device
        rows, lengths = shard.rows(micro_batch), shard.lengths(micro_batch)
        logprobs, entropy = self._forward(self._zero.arrangement.batch(micro_batch, rows, device))
        if not rows:
            return empty_loss(logprobs)
        engine = flatten(rows, [row.logprobs for row in rows], device)
        start = shard.flat(micro_batch, "old_logprobs", device)
        if start is None and turn.update == 0:
            start = logprobs.detach()
        if start is not None and turn.epoch == 0:
            _meter_parity(meter, start, engine)
        old = engine if algorithm.old_logprobs == "engine" else start
        assert old is not None, "a batch with several updates has old log-probs"
        result = self._surrogate_loss(micro_batch, shard, meter, turn, logprobs, old, engine)
        loss = result.loss_N
        reference = shard.flat(micro_batch, "reference", device)
        if reference is not None:
            loss = self._with_kl(loss, meter, logprobs, reference, old)
        # A coefficient of 0 leaves the term out, and with it the entropy's backward pass.
        if algorithm.entropy_coefficient > 0:
            loss = loss - algorithm.entropy_coefficient * entropy
        meter.add("policy/entropy", entropy)
        meter.add("policy/update_kl", kl_per_token(old, logprobs, "k3"))
        if self._uses_ratio:
            meter.add("policy/clip_fraction", result.clipped_N.float())
            meter.add_maximum("policy/ratio_max", result.ratio_N)
        check_finite(loss, micro_batch.sample_ids, lengths)
        weights = [token_weight(algorithm.aggregation, length, totals) for length in lengths]
        return weighted_sum(loss, per_token(weights, lengths, device))

    def _surrogate_loss(
        self,
        micro_batch: MicroBatch,
        shard: Shard,
        meter: TokenMeter,
        turn: Turn,
        logprobs: Tensor,
        old: Tensor,
        engine: Tensor,
    ) -> PolicyLoss:
        lengths, device = shard.lengths(micro_batch), self._zero.device
        rows_N = row_of_token(lengths, device)
        corrected = None
        if self._correction is not None:
            corrected = correct(old, engine, rows_N, len(lengths), self._correction)
        if corrected is not None and turn.epoch == 0:
            meter.add("correction/weight_mean", corrected.weights_N)
            meter.add("correction/weight_square", corrected.weights_N.square())
            meter.add("correction/kept_fraction", corrected.kept_N.float())
        advantages = shard.flat(micro_batch, "advantages", device)
        if advantages is None:
            raise ValueError("the samples have no advantages")
        weights = corrected.weights_N if corrected is not None else None
        tokens = LossTokens(logprobs, old, advantages, rows_N, len(lengths), weights)
        return policy_loss(tokens, self._config.algorithm, self._surrogate)

    def _with_kl(self, loss: Tensor, meter: TokenMeter, logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
        """The loss with KL from the reference, where that stands in the loss; measured wherever there is one."""
        kl = self._config.algorithm.kl
        meter.add("policy/kl", kl_per_token(logprobs, reference, kl.estimator))
        if kl.where != "loss":
            return loss
        term = kl_loss_per_token(logprobs, reference, kl.estimator, old if kl.unbiased else None)
        return add_kl(loss, term, self.kl_coefficient)


def _meter_parity(meter: TokenMeter, trainer: Tensor, engine: Tensor) -> None:
    """Compare the trainer's log-probs with the engine's of the same tokens and weights."""
    difference = (trainer - engine).abs()
    meter.add("parity/mean_abs", difference)
    meter.add_maximum("parity/max_abs", difference)
    meter.add("parity/kl", mismatch_kl(trainer, engine))
