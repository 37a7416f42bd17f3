"""What the driver and a learner say to each other about a transfer; imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.weights.receipts import Receipt
from rlhf.weights.transports import Transport


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
