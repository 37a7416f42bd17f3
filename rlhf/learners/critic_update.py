"""The critic's loss: clipped squared error against the returns, on the response tokens of a micro-batch."""

from __future__ import annotations

from torch import Tensor

from rlhf.algorithms.aggregation import Totals, token_weight
from rlhf.algorithms.losses import weighted_sum
from rlhf.algorithms.value import explained_variance, value_loss
from rlhf.batching import MicroBatch
from rlhf.config.schema import Config
from rlhf.learners.meter import TokenMeter
from rlhf.learners.ranks import Ranks
from rlhf.learners.shard import Shard
from rlhf.learners.update import Turn, UpdateLoop, check_finite, empty_loss, per_token
from rlhf.learners.zero import ZeroEngine
from rlhf.models.arrangement import Batch

# Averages that only serve to compute the explained variance.
_MOMENTS = ("critic/return_square", "critic/error_mean", "critic/error_square")


class CriticUpdate(UpdateLoop):
    """The updates of the critic; every token counts the same."""

    role = "critic"
    reads = ("values", "returns")

    def __init__(self, config: Config, zero: ZeroEngine, ranks: Ranks) -> None:
        steps = config.critic.warmup_batches + config.run.steps
        super().__init__(config, config.critic, steps, zero, ranks)

    def predict(self, batch: Batch) -> Tensor:
        values: Tensor = self._zero.forward(batch)
        return values

    def meter(self, shard: Shard) -> TokenMeter:
        return TokenMeter(("critic/value_mean", "critic/return_mean", "critic/clip_fraction", *_MOMENTS))

    def summarise(self, reduced: dict[str, float]) -> dict[str, float]:
        return_square, error_mean, error_square = (reduced.pop(name) for name in _MOMENTS)
        explained = explained_variance(1, reduced["critic/return_mean"], return_square, error_mean, error_square)
        return reduced if explained is None else {**reduced, "critic/explained_variance": explained}

    def loss(self, micro_batch: MicroBatch, shard: Shard, meter: TokenMeter, totals: Totals, turn: Turn) -> Tensor:
        device, lengths = self._zero.device, shard.lengths(micro_batch)
        rows = shard.rows(micro_batch)
        values = self.predict(self._zero.arrangement.batch(micro_batch, rows, device))
        if not rows:
            return empty_loss(values)
        old, returns = (shard.flat(micro_batch, name, device) for name in self.reads)
        if old is None or returns is None:
            raise ValueError("the samples have no values or no returns")
        result = value_loss(values, old, returns, self._config.critic.value_clip)
        meter.add("critic/clip_fraction", result.clipped_N.float())
        if turn.epoch == 0:
            error = returns.double() - old.double()
            meter.add("critic/value_mean", old)
            meter.add("critic/return_mean", returns)
            meter.add("critic/return_square", returns.double().square())
            meter.add("critic/error_mean", error)
            meter.add("critic/error_square", error.square())
        check_finite(result.loss_N, micro_batch.sample_ids, lengths)
        weights = [token_weight("token_mean", length, totals) for length in lengths]
        return weighted_sum(result.loss_N, per_token(weights, lengths, device))
