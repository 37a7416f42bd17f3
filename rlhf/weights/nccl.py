"""The `nccl` transport: vLLM's own packed NCCL broadcast, with our receipts around its engine side.

One group of vLLM's holds one sender and its engines, so groups are sent to one after the other, and the source is run
through once for each. A broadcast of vLLM's has no deadline of its own: a stuck one ends with the deadline of the
driver's call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferEngine

from rlhf.cluster.ports import release_port
from rlhf.weights.client import CallsFailed, EngineClient
from rlhf.weights.endpoint import Endpoint, Failure
from rlhf.weights.loading import ReceiptMixin
from rlhf.weights.receipts import Receipt
from rlhf.weights.recording import RecordedSource
from rlhf.weights.source import LearnerSource


class VerifiedNCCLWeightTransferEngine(ReceiptMixin, NCCLWeightTransferEngine):
    """vLLM's NCCL engine side; start and finish are ours, `receive_weights` is vLLM's."""


def trainer_init_info(endpoint: Endpoint) -> NCCLTrainerInitInfo:
    """The trainer side's init info of a group, for the sender."""
    return NCCLTrainerInitInfo(
        master_address=endpoint.address,
        master_port=endpoint.port,
        world_size=1 + sum(endpoint.workers),
        packed_buffer_size_bytes=endpoint.bucket_bytes,
        rank=0,
    )


class NcclSender:
    """Rank 0 of every transfer group, one of vLLM's trainer engines for each."""

    def __init__(self, source: LearnerSource) -> None:
        self._source = RecordedSource(source)
        self._engines: dict[int, Any] = {}

    def join(self, endpoint: Endpoint) -> tuple[Failure, ...]:
        """Meet the engines of a new group; returns which of them did not come."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = EngineClient(endpoint.engines, endpoint.workers, endpoint.deadline_s)
        # vLLM binds it by itself.
        release_port(endpoint.port)
        try:
            self._engines[endpoint.epoch] = WeightTransferTrainerFactory.trainer_init(
                trainer_init_info(endpoint), client=client, source=self._source
            )
        except CallsFailed as failed:
            return tuple(Failure(endpoint.epoch, place, reason) for place, reason in failed.failures.items())
        return ()

    def leave(self, epoch: int) -> None:
        """Close a group's communicator."""
        engine = self._engines.pop(epoch, None)
        if engine is not None:
            engine.shutdown()

    def send(self, epochs: Sequence[int]) -> tuple[Receipt, dict[str, float], tuple[Failure, ...]]:
        """One transfer to these groups: receipt, seconds by part, and what failed because of engines."""
        failures: list[Failure] = []
        for epoch in epochs:
            passes = self._source.passes
            try:
                self._engines[epoch].send_weights()
            except CallsFailed as failed:
                failures += [Failure(epoch, place, reason) for place, reason in failed.failures.items()]
                # The other ranks gather for this group, whatever happened to it.
                self._source.drain(passes + 1)
        return self._source.receipt, dict(self._source.seconds), tuple(failures)
