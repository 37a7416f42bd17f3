"""The sync transaction, as the driver conducts it.

Invariants (each has a test)
- Begin, transfer, compare, commit: no engine serves between its begin and its commit.
- The commit comes after the receipts of every engine rank were found equal to the sender's, and the version is the one
  that the sender reports.
- When anything fails before the commits, no engine has committed and none serves. The failure names the engines to
  blame; without them the others sync again, in new groups and with no restart.
- An engine that was blamed is not called again.
- A commit that fails blames its engine; the others have committed weights that were verified.

Calls come one at a time: a sync waits for an admission under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf.cluster.wait import wait
from rlhf.tracking.spans import now, span
from rlhf.weights.endpoint import Endpoint, Failure, Pause, SendReport
from rlhf.weights.groups import Membership, TransferGroup
from rlhf.weights.receipts import WIRE_LOST, Receipt, SyncError, SyncFailed, compare
from rlhf.weights.transports import Transport

log = logging.getLogger(__name__)

# How long an engine that is asked whether it still answers may take: its workers are idle then.
ANSWER_S = 10.0
# Start, loading, finish, and the buckets, each with the deadline.
_CALLS_OF_A_TRANSFER = 4


class SendingGroup(Protocol):
    """The policy's actor group, as far as a sync needs it."""

    async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        """Call `method` on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed sync: version, payload bytes, seconds in all and by part, and how long the engines were paused.

    `seconds` is from begin to commit. `timings`: begin (until nothing runs any more: with `drain`, what was running is
    finished in it), the sender's parts, and the slowest engine's as `engine_*`. `paused_s` is from the end of begin to
    the commit, when nothing is generated.
    """

    version: int
    bytes: int
    seconds: float
    timings: Mapping[str, float] = field(default_factory=dict)
    paused_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The step's `weights/*` metrics."""
        return {
            "weights/version": float(self.version),
            "weights/bytes": float(self.bytes),
            "weights/seconds": self.seconds,
            "weights/paused_seconds": self.paused_s,
            **{f"weights/{part}_seconds": seconds for part, seconds in self.timings.items()},
        }


class WeightSync:
    """The weights' way from one policy to a fleet that changes.

    `address` gives an address of the policy's rank 0 and a port that is free there. `deadline_s` is that of each call,
    `learner_deadline_s` how long the policy may be busy with something else before a transfer begins.
    """

    def __init__(
        self,
        policy: SendingGroup,
        address: Callable[[], Awaitable[tuple[str, int]]],
        *,
        transport: Transport,
        bucket_bytes: int,
        deadline_s: float,
        group_size: int,
        pause: Pause,
        learner_deadline_s: float,
    ) -> None:
        self._policy = policy
        self._address = address
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._pause = pause
        self._learner_deadline_s = learner_deadline_s
        self._membership = Membership(group_size)
        self._handles: dict[int, Any] = {}
        self._workers: dict[int, int] = {}
        # Epochs that policy and engines have joined; those of no group any more are still to be left.
        self._joined: set[int] = set()
        self._blamed: set[int] = set()
        self._turn = asyncio.Lock()

    @property
    def groups(self) -> tuple[TransferGroup, ...]:
        """The transfer groups at this moment."""
        return self._membership.groups

    async def admit(self, engines: Mapping[int, Any], workers: Mapping[int, int]) -> None:
        """Let engines (handles by index, with their numbers of workers) join in new groups; others aren't disturbed.

        Raises `SyncFailed` for engines that don't come, and `SyncError` when one can't take what the policy will send.
        """
        async with self._turn:
            groups = self._membership.admit(engines)
            self._handles.update(engines)
            self._workers.update(workers)
            self._blamed -= set(engines)
            for group in groups:
                await self._join(group, agree=True)

    async def remove(self, engines: Iterable[int], *, dead: Iterable[int] = ()) -> None:
        """Take engines out of the fleet's syncs; what remains of their groups meets anew in the next sync.

        Those in `dead`, and those that were blamed, aren't called; the others are asked to leave their group.
        """
        async with self._turn:
            gone = set(engines) | set(dead)
            silent = self._blamed | set(dead)
            self._membership.remove(gone)
            for engine in sorted(gone.intersection(self._handles) - silent):
                try:
                    await self._ask(engine, "leave_transfer", deadline_s=ANSWER_S)
                except Exception as error:  # it is out in any case
                    log.warning("engine %d did not leave its transfer group: %s", engine, error)
            for engine in gone:
                self._handles.pop(engine, None)
                self._workers.pop(engine, None)

    async def sync(self, engines: Iterable[int] | None = None) -> SyncReport:
        """Bring the policy's weights to these engines (whole groups; all members by default), as one transaction.

        Raises `SyncFailed` with the engines to blame, and what the policy raised when that failed.
        """
        async with self._turn:
            groups = self._membership.of(engines)
            if not groups:
                raise SyncError("weight sync: there is no engine to bring weights to")
            try:
                return await self._transaction(groups)
            except BaseException as error:
                # Who knows what is still on the wires: they are not used again.
                self._membership.renew(groups)
                if isinstance(error, SyncFailed):
                    self._blamed |= error.engines
                raise

    async def _transaction(self, groups: Sequence[TransferGroup]) -> SyncReport:
        start = now()
        members = [engine for group in groups for engine in group.engines]
        with span("begin"):
            await self._on(members, "begin_sync", self._pause)
        paused = now()
        for group in groups:
            if group.epoch not in self._joined:
                await self._join(group)
        with span("transfer"):
            sent = await self._send(groups)
        received = await self._on(members, "weight_receipts")
        self._compare(sent.receipt, received)
        with span("commit"):
            await self._on(members, "commit_sync", sent.version)
        end = now()
        parts = _slowest([worker["seconds"] for workers in received.values() for worker in workers])
        timings = {"begin": paused - start, **sent.timings, **{f"engine_{part}": s for part, s in parts.items()}}
        return SyncReport(sent.version, sent.receipt.bytes, end - start, timings, paused_s=end - paused)

    async def _send(self, groups: Sequence[TransferGroup]) -> SendReport:
        deadline_s = self._learner_deadline_s + _CALLS_OF_A_TRANSFER * self._deadline_s
        epochs = [group.epoch for group in groups]
        reports = await self._policy.call("send_weights", epochs, what="weight sync: send", deadline_s=deadline_s)
        sent: SendReport = reports[0]
        await self._blame(groups, sent.failures)
        if not sent.receipt.checksums:
            raise SyncError("weight sync: the policy sent no tensor")
        return sent

    async def _join(self, group: TransferGroup, *, agree: bool = False) -> None:
        """Let policy and engines of a group meet; with `agree` the engines also try what they will be sent."""
        await self._leave_old()
        address, port = await self._address()
        endpoint = Endpoint(
            group.epoch,
            self._transport,
            address,
            port,
            [self._handles[engine] for engine in group.engines],
            [self._workers[engine] for engine in group.engines],
            self._bucket_bytes,
            self._deadline_s,
        )
        deadline_s = self._learner_deadline_s + 2 * self._deadline_s
        self._joined.add(group.epoch)
        reports = await self._policy.call(
            "join_transfer", endpoint, what=f"weight sync: group {group.epoch}", deadline_s=deadline_s
        )
        try:
            await self._blame([group], reports[0].failures)
            if agree:
                found = await self._on(group.engines, "weight_disagreements", reports[0].declared)
        except SyncFailed as failed:
            self._blamed |= failed.engines
            self._membership.renew([group])
            raise
        if agree:
            for engine, workers in found.items():
                for rank, problem in enumerate(workers):
                    if problem is not None:
                        raise SyncError(f"weight sync: engine {engine} rank {rank} can't take these weights: {problem}")

    async def _leave_old(self) -> None:
        old = self._joined - {group.epoch for group in self._membership.groups}
        for epoch in sorted(old):
            await self._policy.call(
                "leave_transfer",
                epoch,
                what=f"weight sync: leave group {epoch}",
                deadline_s=self._learner_deadline_s + self._deadline_s,
            )
            self._joined.discard(epoch)

    async def _ask(self, engine: int, method: str, *args: Any, deadline_s: float) -> Any:
        call = getattr(self._handles[engine], method).remote(*args)
        return await wait(call, what=f"weight sync: {method} on engine {engine}", deadline_s=deadline_s)

    async def _try(
        self, engines: Iterable[int], method: str, *args: Any, deadline_s: float
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Call each of them; what they answered, and why some didn't."""
        order = list(engines)
        calls = (self._ask(engine, method, *args, deadline_s=deadline_s) for engine in order)
        outcomes = dict(zip(order, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for outcome in outcomes.values():
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome
        failed = {engine: str(o) for engine, o in outcomes.items() if isinstance(o, Exception)}
        return {engine: o for engine, o in outcomes.items() if engine not in failed}, failed

    async def _on(self, engines: Iterable[int], method: str, *args: Any) -> dict[int, Any]:
        """What each of them answered; raises `SyncFailed` with those that failed or passed the deadline."""
        answers, failed = await self._try(engines, method, *args, deadline_s=self._deadline_s)
        _raise(failed)
        return answers

    async def _blame(self, groups: Sequence[TransferGroup], failures: Sequence[Failure]) -> None:
        """Raise `SyncFailed` if there are failures, with whose fault they are as far as it can be told.

        Where only calls failed it is theirs. Where a wire broke, calls fail of engines that lost it too; then whoever
        doesn't answer any more, down to its workers, is to blame.
        """
        if not failures:
            return
        broken = {failure.epoch for failure in failures if failure.place is None or WIRE_LOST in failure.reason}
        blamed: dict[int, str] = {}
        reasons: dict[int, list[Failure]] = defaultdict(list)
        for failure in failures:
            reasons[failure.epoch].append(failure)
        for group in (group for group in groups if group.epoch in reasons):
            own = {group.engines[f.place]: f.reason for f in reasons[group.epoch] if f.place is not None}
            if group.epoch in broken:
                _, silent = await self._try(group.engines, "probe", deadline_s=ANSWER_S)
                own = silent or {engine: why for engine, why in own.items() if WIRE_LOST not in why}
            blamed |= own
        _raise(blamed, "; ".join(f"group {f.epoch}: {f.reason}" for f in failures))
        raise SyncFailed(f"weight sync: {'; '.join(f.reason for f in failures)}; every engine still answers")

    def _compare(self, sent: Receipt, received: Mapping[int, Any]) -> None:
        wrong: dict[int, str] = {}
        for engine, workers in received.items():
            for rank, receipt in enumerate(workers):
                loaded = Receipt(checksums=receipt["checksums"], bytes=receipt["bytes"])
                try:
                    compare(sent, loaded, who=f"engine {engine} rank {rank}")
                except SyncError as error:
                    wrong.setdefault(engine, str(error))
        _raise(wrong)


def _raise(failed: Mapping[int, str], context: str = "") -> None:
    if failed:
        reasons = "; ".join(f"engine {engine}: {why}" for engine, why in sorted(failed.items()))
        raise SyncFailed(f"weight sync failed. {reasons}{f' ({context})' if context else ''}", frozenset(failed))


def _slowest(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest seconds of any worker, part by part."""
    return {part: max(worker[part] for worker in workers) for part in workers[0]}
