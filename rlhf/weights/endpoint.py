"""What the driver and a learner say to each other about a transfer; imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf.weights.receipts import Receipt
from rlhf.weights.transports import Transport

# What becomes of an engine's requests in a sync: finished first, or held and continued by the new weights.
Pause = Literal["keep", "drain"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One transfer group: where it meets, and who is in it (engine handles, and the number of workers of each)."""

    epoch: int
    transport: Transport
    address: str
    port: int
    engines: Sequence[Any]
    workers: Sequence[int]
    bucket_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Declared:
    """One tensor as it will be sent: its name in the checkpoint, torch's name of its dtype, its full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in group `epoch`: a call to its engine number `place`, or with None the wire to all of them."""

    epoch: int
    place: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What one policy rank has to say after joining a group: what it will send, and which engines did not join."""

    declared: tuple[Declared, ...]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one policy rank sent: its receipt (empty but on the sender), seconds in all and by part, and what failed.

    `version` is the number of optimizer steps behind what was sent, as the learner knows it. `timings` has the seconds
    of gather, cast (into the bucket), checksum (in a thread beside) and wire (waited for, not hidden).
    """

    receipt: Receipt
    seconds: float
    version: int
    timings: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
