"""Ranks of a sequence group as threads of this process, with gloo between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf.models.sequence import SequenceGroup

T = TypeVar("T")

# Of one exchange: a rank that failed leaves the others waiting.
DEADLINE_S = 60


def on_ranks(size: int, work: Callable[[SequenceGroup], T]) -> list[T]:
    """What `work` returns on each of `size` ranks; raises what it raised on the first that failed."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(lambda rank=rank: work(_join(store, rank, size))) for rank in range(size)]
        return [rank.result() for rank in ranks]


def _join(store: Any, rank: int, size: int) -> SequenceGroup:
    group: Any = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=DEADLINE_S))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return SequenceGroup(group, rank, size)
