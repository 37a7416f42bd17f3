"""Buckets: how tensors are cut into collectives.

Invariants (each has a test)
- Every tensor is in exactly one bucket, in the source's order.
- A bucket holds at most `bucket_bytes`, except a single larger tensor, which is a bucket of its own.
- Every tensor starts at a multiple of 16 bytes, so that its bytes can be viewed in any dtype.
- The plan is a pure function of names, dtypes, shapes and the cap: sender and receivers compute it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a bucket: `offset` and `nbytes` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of the bucket's bytes (a uint8 tensor)."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one collective of `nbytes` bytes."""

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket, padding included."""
        last = self.slots[-1]
        return _aligned(last.offset + last.nbytes)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def plan_buckets(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], bucket_bytes: int) -> Iterator[Bucket]:
    """Cut the sequence of (name, dtype, shape) into buckets of at most `bucket_bytes` bytes."""
    slots: list[Slot] = []
    end = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * dtype.itemsize
        if slots and _aligned(end + nbytes) > bucket_bytes:
            yield Bucket(tuple(slots))
            slots, end = [], 0
        slots.append(Slot(name, dtype, tuple(shape), end, nbytes))
        end = _aligned(end + nbytes)
    if slots:
        yield Bucket(tuple(slots))
