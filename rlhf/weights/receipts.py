"""Receipts: proof that what was loaded is what was sent.

The sender records a checksum of every tensor as it leaves, each engine rank one of every tensor at the point where it
is loaded. `compare` says what differs, tensor by tensor. The recorders wrap vLLM's own interfaces, so they serve every
transport alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rlhf.weights.checksum import checksum


class SyncError(RuntimeError):
    """A weight sync failed; the engines concerned have not committed and do not serve."""


@dataclass(slots=True)
class Receipt:
    """What one party sent or loaded: checksum by checkpoint name, and bytes in total."""

    checksums: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def record(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor."""
        self.checksums[name] = checksum(tensor)
        self.bytes += tensor.numel() * tensor.element_size()


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


class RecordedSource(WeightSource):
    """A `WeightSource` that leaves a receipt of what it yields on the sender; other ranks only join the gathers."""

    def __init__(self, source: WeightSource, *, is_sender: bool) -> None:
        self._source = source
        self._is_sender = is_sender
        self.receipt = Receipt()

    def metadata(self) -> list[ParamMeta]:
        """Names, wire dtypes and full shapes, in the order of iteration."""
        return list(self._source.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.receipt = Receipt()
        for name, tensor in self._source:
            if self._is_sender:
                self.receipt.record(name, tensor)
            yield name, tensor


@contextmanager
def recorded_loading(model: Any, receipt: Receipt) -> Iterator[None]:
    """Within the block, every tensor given to `model.load_weights` is recorded in `receipt` where it is loaded."""
    load = model.load_weights

    def observed(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                receipt.record(name, tensor)
                yield name, tensor

        return load(each(), *args, **kwargs)

    model.load_weights = observed
    try:
        yield
    finally:
        # The instance attribute shadowed the method; removing it restores the class's own.
        del model.load_weights
