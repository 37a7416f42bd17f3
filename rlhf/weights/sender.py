"""The trainer side of the weight sync, as one object that a learner rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.tracking.spans import now
from rlhf.weights.client import EngineClient
from rlhf.weights.receipts import Receipt, RecordedSource
from rlhf.weights.source import LearnerSource
from rlhf.weights.transports import Transport, register_transports, trainer_init_info


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a transfer group meets, and who is in it: engine handles and the number of workers of each."""

    transport: Transport
    address: str
    port: int
    engines: Sequence[Any]
    workers: Sequence[int]
    bucket_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one policy rank sent: its receipt (empty but on the sender) and how long it took, seconds."""

    receipt: Receipt
    seconds: float


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
