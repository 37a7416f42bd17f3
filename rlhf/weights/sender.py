"""The trainer side of the weight sync, as one object that a learner rank owns."""

from __future__ import annotations

from rlhf.tracking.spans import now
from rlhf.weights.client import EngineClient
from rlhf.weights.endpoint import Endpoint, SendReport
from rlhf.weights.recording import RecordedSource
from rlhf.weights.source import LearnerSource
from rlhf.weights.transports import register_transports, trainer_init_info


class WeightSender:
    """Joins the transfer group at construction and sends the source's weights on each `send`."""

    def __init__(self, source: LearnerSource, endpoint: Endpoint, rank: int) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        register_transports()
        self._source = RecordedSource(source, is_sender=rank == 0)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(
                endpoint.transport,
                rank=rank,
                address=endpoint.address,
                port=endpoint.port,
                world_size=1 + sum(endpoint.workers),
                bucket_bytes=endpoint.bucket_bytes,
                timeout_s=endpoint.deadline_s,
            ),
            client=EngineClient(endpoint.engines, endpoint.workers, endpoint.deadline_s),
            source=self._source,
        )

    def send(self) -> SendReport:
        """One whole transfer. Called on every policy rank; only rank 0's report has a receipt."""
        start = now()
        self._engine.send_weights()
        return SendReport(self._source.receipt, now() - start)

    def close(self) -> None:
        """Leave the transfer group."""
        self._engine.shutdown()
