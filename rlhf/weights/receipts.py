"""Receipts: proof that what was loaded is what was sent.

The sender records a checksum of every tensor as it leaves, each engine rank one of every tensor at the point where it
is loaded (`rlhf.weights.recording`). `compare` says what differs, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# How a worker's error begins when it did not get a bucket, which says nothing about whose fault that was.
WIRE_LOST = "weight sync: a bucket was not received"


class SyncError(RuntimeError):
    """A weight sync failed; the engines concerned have not committed and do not serve."""


class SyncFailed(SyncError):
    """A sync failed because of these engines (by index); none where it was the sender, or can't be told."""

    def __init__(self, message: str, engines: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.engines = engines


@dataclass(slots=True)
class Receipt:
    """What one party sent or loaded: checksum by checkpoint name, and bytes in total."""

    checksums: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def compare(sent: Receipt, received: Receipt, *, who: str) -> None:
    """Raise `SyncError` naming up to five tensors that `who` lacks, has in excess, or has with other bytes."""
    missing = sorted(sent.checksums.keys() - received.checksums.keys())
    surplus = sorted(received.checksums.keys() - sent.checksums.keys())
    differing = sorted(n for n, c in sent.checksums.items() if received.checksums.get(n, c) != c)
    problems = [
        f"{len(names)} {what} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
        for what, names in (("not received", missing), ("never sent", surplus), ("with other bytes", differing))
        if names
    ]
    if problems:
        raise SyncError(f"weight sync: {who} has of {len(sent.checksums)} tensors {'; '.join(problems)}")
