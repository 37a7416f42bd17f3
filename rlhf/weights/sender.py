"""The trainer side of the weight sync, as one object that a learner rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf.tracking.spans import now
from rlhf.weights.endpoint import Declared, Endpoint, JoinReport, SendReport
from rlhf.weights.gloo_sender import GlooSender
from rlhf.weights.receipts import Receipt, SyncError
from rlhf.weights.source import LearnerSource, WeightHolder
from rlhf.weights.transports import Transport


class WeightSender:
    """A learner rank's part in all transfer groups. Every rank makes the same calls; only rank 0 talks to engines."""

    def __init__(
        self, holder: WeightHolder, wire_dtype: torch.dtype, transport: Transport, bucket_bytes: int, rank: int
    ) -> None:
        self._source = LearnerSource(holder, wire_dtype, bucket_bytes)
        self._declared = tuple(
            Declared(meta.name, str(meta.dtype).removeprefix("torch."), meta.shape) for meta in self._source.metadata()
        )
        self._transport = transport
        self._epochs: set[int] = set()
        self._gloo = GlooSender() if rank == 0 and transport == "gloo" else None
        self._nccl = None
        if rank == 0 and transport == "nccl":
            from rlhf.weights.nccl import NcclSender

            self._nccl = NcclSender(self._source)

    def join(self, endpoint: Endpoint) -> JoinReport:
        """Meet the engines of a new group."""
        sender = self._gloo or self._nccl
        failures = () if sender is None else sender.join(endpoint)
        if not failures:
            self._epochs.add(endpoint.epoch)
        return JoinReport(self._declared, failures)

    def leave(self, epoch: int) -> None:
        """Leave a group; one that never was is ignored."""
        self._epochs.discard(epoch)
        sender = self._gloo or self._nccl
        if sender is not None:
            sender.leave(epoch)

    def send(self, epochs: Sequence[int], version: int) -> SendReport:
        """One whole transfer to these groups. Only rank 0's report has a receipt."""
        start = now()
        strangers = sorted(set(epochs) - self._epochs)
        if strangers:
            raise SyncError(f"weight sync: this learner is not in the transfer groups {strangers}")
        if self._gloo is not None:
            receipt, seconds, failures = self._gloo.send(epochs, self._source, self._declared)
        elif self._nccl is not None:
            receipt, seconds, failures = self._nccl.send(epochs)
        else:
            receipt, seconds, failures = Receipt(), {}, ()
            for _ in range(1 if self._transport == "gloo" else len(epochs)):
                self._source.follow()
        return SendReport(receipt, now() - start, version, seconds, failures)
