"""Memory for received buckets that is used again: fresh pages cost several times the copy that fills them."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch

# Of a slab that nobody views: the list's own reference, the loop's, and the argument's.
_FREE = 3


class Slabs:
    """Buffers on CPU. One is taken again as soon as no tensor views it any more.

    The layerwise loader holds views of a bucket until their layer is complete, and doesn't say for how long. A buffer
    that is handed out refers to its slab for as long as any tensor views it, so the slab's reference count tells.
    """

    def __init__(self) -> None:
        self._slabs: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of `nbytes` bytes (uint8), its content undefined."""
        for slab in self._slabs:
            if slab.nbytes >= nbytes and sys.getrefcount(slab) <= _FREE:
                return torch.from_numpy(slab)[:nbytes]
        # A free one that was too small would stay unused as likely as not.
        self._slabs = [slab for slab in self._slabs if sys.getrefcount(slab) > _FREE]
        slab = np.empty(nbytes, np.uint8)
        self._slabs.append(slab)
        return torch.from_numpy(slab)
