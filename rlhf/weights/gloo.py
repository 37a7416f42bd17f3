"""The `gloo` transport: vLLM's weight-transfer protocol over a gloo process group, for CPU.

Rank 0 of the group is the policy's rank 0, which hosts the store; engine workers follow at their engine's offset plus
their rank within the engine. Buckets go out one collective each; while one is on the wire the next is gathered, cast
and packed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlhf.weights.buckets import Bucket, plan_buckets
from rlhf.weights.loading import ReceiptMixin
from rlhf.weights.receipts import SyncError

_POLL_S = 0.0005


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What an engine worker needs to join the group. `rank_offset` is set for each engine by our client."""

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float
    rank_offset: int = 1


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to arrive: names, dtypes and full shapes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The bucket plan; the same on both sides, since it is computed from the same declaration."""
        dtypes = [getattr(torch, name) for name in self.dtype_names]
        tensors = zip(self.names, dtypes, [tuple(s) for s in self.shapes], strict=True)
        return plan_buckets(list(tensors), bucket_bytes)


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Trainer-side init info; rank 0 is the sender and hosts the store at `master_address:master_port`."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


class GlooGroup:
    """A process group of its own, apart from torch's global default group."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        # The group keeps only a weak hold on the store: without this reference its server dies under it.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        prefixed = dist.PrefixStore("rlhf-weights", self._store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start a broadcast from rank 0; returns the pending work."""
        return self._group.broadcast(tensor, 0)


class GlooWeightTransferEngine(ReceiptMixin):
    """Engine-worker side: receives buckets and loads their tensors."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _group: GlooGroup | None = None
    _bucket_bytes: int = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group at this engine's offset."""
        rank = init_info.rank_offset + self.parallel_config.rank
        self._bucket_bytes = init_info.bucket_bytes
        self._group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every declared bucket and load its tensors.

        After a tensor that can't be loaded the rest is still received, unused: the group stays in step with the
        sender, and the next sync needs no new one.
        """
        if self._group is None:
            raise SyncError("weight sync: update_weights before init_weight_transfer_engine")
        failure: Exception | None = None
        for bucket in update_info.buckets(self._bucket_bytes):
            # A fresh buffer each time: the layerwise loader holds views of it until their layer is complete.
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            self._group.broadcast(buffer).wait()
            if failure is None:
                try:
                    self.model.load_weights([(slot.name, slot.view(buffer)) for slot in bucket.slots])
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Trainer side: gathers, packs and broadcasts, and drives the engines through the client."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        init_info: GlooTrainerInitInfo,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._init_info = init_info
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Rendezvous with the engines; ranks other than the sender only join the gathers later."""
        if source is None:
            raise ValueError("the gloo transport sends from a WeightSource; none was given")
        engine = cls(client=client, source=source, init_info=init_info)
        if engine.is_sender:
            engine._open()
        return engine

    def _open(self) -> None:
        info = self._init_info
        wire = {key: value for key, value in asdict(info).items() if key != "rank"}
        # The workers block in the rendezvous until rank 0 is there, so both sides open it together.
        with _one_thread(lambda: self.client.init_weight_transfer_engine(wire)) as workers:
            self._group = GlooGroup(info.master_address, info.master_port, 0, info.world_size, info.timeout_s)
            _result(workers, "the engines' rendezvous", info.timeout_s)

    def send_weights(self) -> None:
        """One sync: start, buckets, finish. Called on every rank of the policy; only the sender talks to engines."""
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        meta = self.source.metadata()
        declared = GlooUpdateInfo(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).removeprefix("torch.") for m in meta],
            shapes=[list(m.shape) for m in meta],
        )
        self.client.start_weight_update()
        with _one_thread(lambda: self.client.update_weights(asdict(declared))) as receiving:
            self._broadcast(declared, receiving)
            _result(receiving, "loading by the engines", self._init_info.timeout_s)
        self.client.finish_weight_update()

    def _broadcast(self, declared: GlooUpdateInfo, receiving: Future[None]) -> None:
        assert self._group is not None and self.source is not None
        tensors = iter(self.source)
        in_flight: tuple[Any, torch.Tensor] | None = None
        for bucket in declared.buckets(self._init_info.bucket_bytes):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for slot in bucket.slots:
                name, tensor = next(tensors)
                if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
                    raise SyncError(
                        f"weight sync: declared {slot.name} {slot.dtype} {slot.shape} but the source gave "
                        f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                    )
                slot.view(buffer).copy_(tensor)
            if in_flight is not None:
                self._await(in_flight[0], receiving)
            in_flight = (self._group.broadcast(buffer), buffer)
        if in_flight is not None:
            self._await(in_flight[0], receiving)
        # Runs the source to its end, so that its last gather is left in order on every rank.
        if next(tensors, None) is not None:
            raise SyncError("weight sync: the source yields more tensors than it declared")

    def _await(self, work: Any, receiving: Future[None]) -> None:
        """Wait for a broadcast, but not for a receiver that has already failed: its error is the one to show."""
        deadline = time.monotonic() + self._init_info.timeout_s
        while not work.is_completed():
            if receiving.done() and receiving.exception() is not None:
                receiving.result()
            if time.monotonic() > deadline:
                raise SyncError(f"weight sync: a bucket was not delivered within {self._init_info.timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def _result(call: Future[None], what: str, timeout_s: float) -> None:
    """The call's outcome, awaited for at most `timeout_s` seconds."""
    try:
        call.result(timeout=timeout_s)
    except FutureTimeout as error:
        if call.done():
            raise
        raise SyncError(f"weight sync: {what} was not done within {timeout_s:g} s") from error


class _one_thread:
    """Run one call beside the block. On an error in the block the call is abandoned, never joined: its peer is gone."""

    def __init__(self, call: Any) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")
        self._call = call

    def __enter__(self) -> Future[None]:
        return self._pool.submit(self._call)

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
