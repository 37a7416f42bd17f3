"""The `gloo` transport, engine side and the group: vLLM's weight-transfer protocol over gloo, for CPU.

Rank 0 of a group is the policy's rank 0, which hosts the store; engine workers follow at their engine's offset plus
their rank within the engine. Buckets go out one collective each; a worker receives the next one while it loads the
last. The sender's side is in `rlhf.weights.gloo_sender`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from rlhf.cluster.ports import join_store, serve_store
from rlhf.weights.buckets import Bucket, plan_buckets
from rlhf.weights.checksum import checksum
from rlhf.weights.endpoint import Declared
from rlhf.weights.loading import ReceiptMixin
from rlhf.weights.receipts import WIRE_LOST, SyncError
from rlhf.weights.slabs import Slabs

T = TypeVar("T")

# How often a worker that waits for a bucket looks whether the sender has given up.
_LOOK_S = 0.2
# A bucket that is loaded and one that is received.
_RECEIVE_BUFFERS = 2
_GIVEN_UP = "given-up"


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

    @classmethod
    def of(cls, declared: tuple[Declared, ...]) -> GlooUpdateInfo:
        """The message about these tensors."""
        return cls([d.name for d in declared], [d.dtype for d in declared], [list(d.shape) for d in declared])

    def wire(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The bucket plan; the same on both sides, since it is computed from the same declaration."""
        dtypes = [getattr(torch, name) for name in self.dtype_names]
        tensors = zip(self.names, dtypes, [tuple(s) for s in self.shapes], strict=True)
        return plan_buckets(list(tensors), bucket_bytes)


class GlooGroup:
    """A process group of its own, apart from torch's global default group."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._place = (rank, world_size, timeout)
        # The group keeps only a weak hold on the store: without this reference its server dies under it.
        self._store = serve_store(port, timeout) if rank == 0 else join_store(address, port, timeout)
        self._group: Any = None

    def connect(self) -> None:
        """Meet the others; returns when all are there."""
        prefixed = dist.PrefixStore("rlhf-weights", self._store)  # type: ignore[attr-defined]
        self._group = dist.ProcessGroupGloo(prefixed, *self._place)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start a broadcast from rank 0; returns the pending work."""
        return self._group.broadcast(tensor, 0)

    def give_up(self) -> None:
        """Tell the members that no more will come: gloo can't be interrupted, and they would wait for its timeout."""
        self._store.set(_GIVEN_UP, "")

    def given_up(self) -> bool:
        """Whether the sender gave up; raises where the sender is gone."""
        return bool(self._store.check([_GIVEN_UP]))


class GlooWeightTransferEngine(ReceiptMixin):
    """Engine-worker side: receives buckets and loads their tensors."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _group: GlooGroup | None = None
    _bucket_bytes: int = 0
    _slabs: Slabs | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group at this engine's offset; an earlier group is left."""
        rank = init_info.rank_offset + self.parallel_config.rank
        self._bucket_bytes = init_info.bucket_bytes
        group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )
        meeting = beside(group.connect, "weight-sync-rendezvous")
        while True:
            try:
                meeting.result(timeout=_LOOK_S)
                break
            except FutureTimeout:
                _look(group)
            except RuntimeError as error:
                raise SyncError(f"{WIRE_LOST}: the group did not meet ({error})") from error
        self._group = group

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every declared bucket and load its tensors.

        After a tensor that can't be loaded the rest is still received, unused: the group stays in step with the
        sender, and the other engines of the group get theirs. When a bucket can't be received the group is left.
        """
        if self._group is None:
            raise SyncError("weight sync: update_weights before init_weight_transfer_engine")
        self._slabs = self._slabs or Slabs()
        failure: Exception | None = None
        buckets = list(update_info.buckets(self._bucket_bytes))
        try:
            with _Arriving(self._group, buckets, self._slabs, self.checked) as arriving:
                for bucket, buffer in arriving:
                    if failure is None:
                        try:
                            self.model.load_weights([(slot.name, slot.view(buffer)) for slot in bucket.slots])
                        except Exception as error:
                            failure = error
                    # What the loader still needs it holds itself; the thread may have the rest.
                    del buffer
        except SyncError:
            # Its thread may still be receiving into the slabs.
            self._group = self._slabs = None
            raise
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class _Arriving:
    """Buckets as they arrive: a thread receives the next one, and takes its checksums, while the last one is in use."""

    def __init__(self, group: GlooGroup, buckets: list[Bucket], slabs: Slabs, checked: dict[str, int]) -> None:
        self._group = group
        self._buckets = buckets
        self._slabs = slabs
        self._checked = checked
        self._arrived: queue.SimpleQueue[torch.Tensor | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(_RECEIVE_BUFFERS)
        self._left = False
        # A daemon, never joined: a receive can't be interrupted and ends at gloo's own timeout.
        self._thread = threading.Thread(target=self._receive, name="weight-sync", daemon=True)

    def __enter__(self) -> _Arriving:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left = True
        self._room.release()

    def _receive(self) -> None:
        try:
            for bucket in self._buckets:
                self._room.acquire()
                if self._left:
                    return
                buffer = self._slabs.take(bucket.nbytes)
                self._group.broadcast(buffer).wait()
                for slot in bucket.slots:
                    self._checked[slot.name] = checksum(slot.view(buffer))
                self._arrived.put(buffer)
                # Without this the slab would seem in use until the next one was received.
                del buffer
        except Exception as error:
            self._arrived.put(error)

    def __iter__(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket in self._buckets:
            yield bucket, self._next()
            self._room.release()

    def _next(self) -> torch.Tensor:
        while True:
            try:
                arrived = self._arrived.get(timeout=_LOOK_S)
            except queue.Empty:
                _look(self._group)
                continue
            if isinstance(arrived, Exception):
                raise SyncError(f"{WIRE_LOST}: {arrived}") from arrived
            return arrived


def _look(group: GlooGroup) -> None:
    """Raise when the sender gave up or is gone."""
    try:
        given_up = group.given_up()
    except Exception as error:
        raise SyncError(f"{WIRE_LOST}: the sender is gone ({error})") from error
    if given_up:
        raise SyncError(f"{WIRE_LOST}: the sender gave up")


def beside(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a daemon thread, which is left alone where its outcome isn't wanted any more."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
