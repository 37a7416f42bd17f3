"""Recorders that leave receipts: around the sender's source and around an engine's `load_weights`.

They wrap vLLM's own interfaces, so they serve every transport alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rlhf.tracking.spans import now
from rlhf.weights.checksum import checksum
from rlhf.weights.receipts import Receipt


def record(receipt: Receipt, name: str, tensor: torch.Tensor, known: int | None = None) -> None:
    """Add one tensor to a receipt, with its checksum where that is known already."""
    receipt.checksums[name] = checksum(tensor) if known is None else known
    receipt.bytes += tensor.numel() * tensor.element_size()


class RecordedSource(WeightSource):
    """A sender's `WeightSource` that leaves a receipt of what it yielded in its last pass, and the seconds spent."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.passes = 0
        self.receipt = Receipt()
        self.seconds: dict[str, float] = {}

    def metadata(self) -> list[ParamMeta]:
        """Names, wire dtypes and full shapes, in the order of iteration."""
        return list(self._source.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        self._pass = self._record()
        return self._pass

    def drain(self, passes: int) -> None:
        """Run the last pass to its end, having begun at least `passes`: gathering is collective."""
        if self.passes < passes:
            iter(self)
        for _ in self._pass:
            pass

    def _record(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.receipt = Receipt()
        self.seconds = {"gather": 0.0, "checksum": 0.0}
        asked = now()
        for name, tensor in self._source:
            given = now()
            record(self.receipt, name, tensor)
            checked = now()
            self.seconds["gather"] += given - asked
            self.seconds["checksum"] += checked - given
            yield name, tensor
            asked = now()


@contextmanager
def recorded_loading(
    model: Any, receipt: Receipt, seconds: MutableMapping[str, float], known: MutableMapping[str, int]
) -> Iterator[None]:
    """Within the block, every tensor given to `model.load_weights` is recorded in `receipt` where it is loaded.

    `known` has checksums by name that were taken of the same memory since it was received. `seconds` gets those of
    `load` and `checksum`.
    """
    load = model.load_weights

    def observed(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        checking = 0.0

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal checking
            for name, tensor in weights:
                start = now()
                record(receipt, name, tensor, known.pop(name, None))
                checking += now() - start
                yield name, tensor

        start = now()
        try:
            return load(each(), *args, **kwargs)
        finally:
            seconds["checksum"] += checking
            seconds["load"] += now() - start - checking

    model.load_weights = observed
    try:
        yield
    finally:
        # The instance attribute shadowed the method; removing it restores the class's own.
        del model.load_weights
