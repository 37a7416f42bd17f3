"""Recorders that leave receipts: around the sender's source and around an engine's `load_weights`.

They wrap vLLM's own interfaces, so they serve every transport alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rlhf.weights.checksum import checksum
from rlhf.weights.receipts import Receipt


def record(receipt: Receipt, name: str, tensor: torch.Tensor) -> None:
    """Add one tensor to a receipt."""
    receipt.checksums[name] = checksum(tensor)
    receipt.bytes += tensor.numel() * tensor.element_size()


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
                record(self.receipt, name, tensor)
            yield name, tensor


@contextmanager
def recorded_loading(model: Any, receipt: Receipt) -> Iterator[None]:
    """Within the block, every tensor given to `model.load_weights` is recorded in `receipt` where it is loaded."""
    load = model.load_weights

    def observed(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                record(receipt, name, tensor)
                yield name, tensor

        return load(each(), *args, **kwargs)

    model.load_weights = observed
    try:
        yield
    finally:
        # The instance attribute shadowed the method; removing it restores the class's own.
        del model.load_weights
