"""The `gloo` transport, sender's side: each bucket is packed once and broadcast on all groups of a sync together.

Invariants (each has a test)
- While one bucket is on the wire the next is gathered, cast and checksummed.
- At most two buckets' worth of memory is taken: two buffers, or at ZeRO 3 one and the gathered piece; and beside them
  one tensor that adapters were merged into.
- All ranks run through the source once for each send, whatever happens to the engines.
- A failure names the engine whose call failed, or the group whose wire broke; nothing is raised for an engine's fault.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from rlhf.tracking.spans import now
from rlhf.weights.buckets import Bucket, Slot
from rlhf.weights.checksum import checksum
from rlhf.weights.client import Calls, CallsFailed, EngineClient
from rlhf.weights.endpoint import Declared, Endpoint, Failure
from rlhf.weights.gloo import GlooGroup, GlooInitInfo, GlooUpdateInfo, beside
from rlhf.weights.receipts import Receipt, SyncError
from rlhf.weights.source import LearnerSource

_POLL_S = 0.0003
# Values copied at a time. torch splits larger copies over threads, which wait for each other: with engines that load on
# the same cores that takes several times as long, and alone it gains little.
_COPY = 1 << 15
PARTS = ("gather", "cast", "checksum", "wire")


@dataclass(slots=True)
class Member:
    """One transfer group as the sender holds it."""

    epoch: int
    client: EngineClient
    wire: GlooGroup
    bucket_bytes: int
    deadline_s: float


class Stopped(Exception):
    """The transfer can't go on because of engines; carries the failures."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(f.reason for f in failures))
        self.failures = tuple(failures)


class GlooSender:
    """Rank 0 of every transfer group."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        # Kept from one send to the next: fresh pages cost several times the copy that fills them.
        self._free: list[torch.Tensor] = []

    def join(self, endpoint: Endpoint) -> tuple[Failure, ...]:
        """Meet the engines of a new group; returns which of them did not come."""
        world = 1 + sum(endpoint.workers)
        info = GlooInitInfo(
            endpoint.address, endpoint.port, world, endpoint.bucket_bytes, timeout_s=endpoint.deadline_s
        )
        client = EngineClient(endpoint.engines, endpoint.workers, endpoint.deadline_s)
        calls = client.begin_init(vars(info))
        wire = GlooGroup(endpoint.address, endpoint.port, 0, world, endpoint.deadline_s)
        # All block in the rendezvous until the last one is there. In a thread, so that an engine which can't come ends
        # it for all.
        meeting = beside(wire.connect, "weight-sync-rendezvous")
        done, pending = wait([meeting, *calls.futures], timeout=endpoint.deadline_s, return_when=FIRST_EXCEPTION)
        if pending or any(future.exception() for future in done):
            wire.give_up()
            failed = _failures(endpoint.epoch, calls.failures())
            return (*failed, Failure(endpoint.epoch, None, f"the group did not meet within {endpoint.deadline_s:g} s"))
        self._members[endpoint.epoch] = Member(endpoint.epoch, client, wire, endpoint.bucket_bytes, endpoint.deadline_s)
        return ()

    def leave(self, epoch: int) -> None:
        """Forget a group. One that was given up is forgotten already."""
        self._members.pop(epoch, None)

    def send(
        self, epochs: Sequence[int], source: LearnerSource, declared: tuple[Declared, ...]
    ) -> tuple[Receipt, dict[str, float], tuple[Failure, ...]]:
        """One transfer to these groups: receipt, seconds by part, and what failed because of engines."""
        members = [self._members[epoch] for epoch in epochs]
        tensors = source.parameters()
        transfer = _Transfer(members, tensors, source.gathers, self._free)
        failures: tuple[Failure, ...] = ()
        try:
            transfer.run(GlooUpdateInfo.of(declared))
        except BaseException as error:
            for member in members:
                self.leave(member.epoch)
            transfer.give_up()
            if not isinstance(error, Stopped):
                raise
            failures = error.failures
            # The other ranks gather what was not sent as well.
            for _ in tensors:
                pass
        finally:
            transfer.close()
        return transfer.receipt, transfer.seconds, failures


class _Transfer:
    """One send under way."""

    def __init__(
        self,
        members: Sequence[Member],
        tensors: Iterator[tuple[str, torch.Tensor]],
        gathers: bool,
        free: list[torch.Tensor],
    ) -> None:
        self._members = members
        self._tensors = tensors
        self._gathers = gathers
        self._receiving: dict[int, Calls] = {}
        self._in_flight: deque[_Flight] = deque()
        self._room = 1 if gathers else 2
        self._free = free
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-checksum")
        self.receipt = Receipt()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def run(self, declared: GlooUpdateInfo) -> None:
        """Start, buckets, finish; raises `Stopped` when an engine or a wire fails."""
        self._finish({m.epoch: m.client.begin("start_weight_update") for m in self._members})
        self._receiving = {m.epoch: m.client.begin("update_weights", declared.wire()) for m in self._members}
        for bucket in declared.buckets(self._members[0].bucket_bytes):
            self._send(bucket)
        # Runs the source to its end, so that its last gather is left in order on every rank.
        if next(self._tensors, None) is not None:
            raise SyncError("weight sync: the source yields more tensors than it declared")
        while self._in_flight:
            self._land()
        for member in self._members:
            self._receiving[member.epoch].extend(member.deadline_s)
        self._finish(self._receiving)
        self._finish({m.epoch: m.client.begin("finish_weight_update") for m in self._members})

    def _send(self, bucket: Bucket) -> None:
        # Asked for before there is a buffer: what is gathered is gathered while the last bucket travels.
        first, *others = bucket.slots
        tensor = self._next(first)
        while len(self._in_flight) >= self._room:
            self._land()
        if (
            not self._gathers
            and tensor.dtype == first.dtype
            and tensor.is_contiguous()
            and first.nbytes == bucket.nbytes
        ):
            # A bucket of one tensor that stays whole where it is: nothing to pack.
            buffer, payload = None, tensor.view(-1).view(torch.uint8)
        else:
            buffer = self._buffer(bucket.nbytes)
            payload = buffer[: bucket.nbytes]
            self._pack(first, tensor, payload)
            del tensor  # it may be a merged one, and the next is made before this function ends
            for slot in others:
                self._pack(slot, self._next(slot), payload)
        works = {m.epoch: m.wire.broadcast(payload) for m in self._members}
        checked = self._checker.submit(self._check, bucket, payload)
        self._in_flight.append(_Flight(buffer, payload, works, checked, time.monotonic()))

    def _next(self, slot: Slot) -> torch.Tensor:
        start = now()
        name, tensor = next(self._tensors)
        if (name, tuple(tensor.shape)) != (slot.name, slot.shape):
            raise SyncError(
                f"weight sync: declared {slot.name} {slot.shape} but the source gave {name} {tuple(tensor.shape)}"
            )
        self.seconds["gather"] += now() - start
        return tensor

    def _pack(self, slot: Slot, tensor: torch.Tensor, payload: torch.Tensor) -> None:
        start = now()
        wholes = (slot.view(payload).view(-1), tensor.reshape(-1))
        for into, part in zip(*(torch.split(whole, _COPY) for whole in wholes), strict=True):
            into.copy_(part)
        self.seconds["cast"] += now() - start

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """A free buffer of at least `nbytes`. One that doesn't fit is given back, so that no more are held."""
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        self._free[:] = fitting[1:]
        return fitting[0] if fitting else torch.empty(nbytes, dtype=torch.uint8)

    def _check(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        start = now()
        for slot in bucket.slots:
            self.receipt.checksums[slot.name] = checksum(slot.view(buffer))
            self.receipt.bytes += slot.nbytes
        self.seconds["checksum"] += now() - start

    def _land(self) -> None:
        """Wait until the oldest bucket was delivered to all groups, but not for an engine that has failed already."""
        start = now()
        flight = self._in_flight[0]
        while not all(work.is_completed() for work in flight.works.values()):
            failed = [f for epoch, calls in self._receiving.items() for f in _failures(epoch, calls.failures())]
            pending = [m for m in self._members if not flight.works[m.epoch].is_completed()]
            late = [m for m in pending if time.monotonic() > flight.since + m.deadline_s]
            if failed or late:
                raise Stopped([*failed, *(self._undelivered(m, f"within {m.deadline_s:g} s") for m in late)])
            time.sleep(_POLL_S)
        broken = []
        for member in self._members:
            try:
                flight.works[member.epoch].wait()
            except Exception as error:
                broken.append(self._undelivered(member, f"({error})"))
        if broken:
            raise Stopped(broken)
        flight.checked.result()
        self._in_flight.popleft()
        if flight.buffer is not None:
            self._free.append(flight.buffer)
        self.seconds["wire"] += now() - start

    def _undelivered(self, member: Member, how: str) -> Failure:
        return Failure(member.epoch, None, f"a bucket was not delivered {how}")

    def _finish(self, calls: Mapping[int, Calls]) -> None:
        failures: list[Failure] = []
        for epoch, pending in calls.items():
            try:
                pending.finish()
            except CallsFailed as failed:
                failures += _failures(epoch, failed.failures)
        if failures:
            raise Stopped(failures)

    def give_up(self) -> None:
        """Release the workers that still wait, and leave the wires to a thread: gloo can't be interrupted."""
        for member in self._members:
            member.wire.give_up()
        held = ([member.wire for member in self._members], list(self._in_flight))
        threading.Thread(target=_outlast, args=held, name="weight-sync-given-up", daemon=True).start()
        self._in_flight.clear()

    def close(self) -> None:
        """End the thread of the checksums."""
        self._checker.shutdown(wait=False)


@dataclass(slots=True)
class _Flight:
    """A bucket on the wire: its buffer, if it took one, pending work by epoch, its checksum, since when it travels.

    `payload` is what travels: a part of the buffer, or one tensor, which nothing else may hold.
    """

    buffer: torch.Tensor | None
    payload: torch.Tensor
    works: Mapping[int, Any]
    checked: Future[None]
    since: float


def _failures(epoch: int, failures: Mapping[int, str]) -> tuple[Failure, ...]:
    return tuple(Failure(epoch, place, reason) for place, reason in failures.items())


def _outlast(wires: list[GlooGroup], flights: list[_Flight]) -> None:
    """Hold a given-up wire until nothing is pending on it: its destructor waits for that with the GIL held."""
    for flight in flights:
        for work in flight.works.values():
            # That it failed is known and reported.
            with contextlib.suppress(Exception):
                work.wait()
    wires.clear()
