"""The sync transaction, as the driver conducts it.

Invariants
- Begin, transfer, compare, commit: no engine serves between its begin and its commit.
- The commit comes after the receipts of every engine rank were found equal to the sender's.
- When anything fails before the first commit, no engine has committed, and none serves; a commit that fails ends the
  run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf.cluster.wait import wait_all
from rlhf.tracking.spans import now, span
from rlhf.weights.receipts import Receipt, SyncError, compare


class SendingGroup(Protocol):
    """The policy's actor group, as far as a sync needs it."""

    async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
        """Call `method` on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed sync: version, payload bytes, and seconds from begin to commit."""

    version: int
    bytes: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The step's `weights/*` metrics."""
        return {
            "weights/version": float(self.version),
            "weights/bytes": float(self.bytes),
            "weights/seconds": self.seconds,
        }


async def sync_weights(policy: SendingGroup, engines: Sequence[Any], version: int, *, deadline_s: float) -> SyncReport:
    """Bring the policy's weights to every engine as `version`, or raise with no engine serving.

    Raises `SyncError` when a receipt differs, and what the failing actor raised otherwise.
    """
    start = now()
    what = f"weight sync to version {version}"

    async def on_engines(method: str, *args: Any) -> list[Any]:
        calls = [getattr(engine, method).remote(*args) for engine in engines]
        return await wait_all(calls, what=f"{what}: {method}", deadline_s=deadline_s)

    await on_engines("begin_sync")
    with span("transfer"):
        # Every call inside has the deadline of its own; this one is for their sum.
        reports = await policy.call("send_weights", what=f"{what}: send_weights", deadline_s=4 * deadline_s)
    sent: Receipt = reports[0].receipt
    if not sent.checksums:
        raise SyncError(f"{what}: the policy sent no tensor")
    receipts = await on_engines("weight_receipts")
    for index, workers in enumerate(receipts):
        for rank, receipt in enumerate(workers):
            received = Receipt(checksums=receipt["checksums"], bytes=receipt["bytes"])
            compare(sent, received, who=f"engine {index} rank {rank}")
    await on_engines("commit_sync", version)
    return SyncReport(version=version, bytes=sent.bytes, seconds=now() - start)
