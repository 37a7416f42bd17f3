"""How fast this machine multiplies matrices, which is what a learner's speed is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Seconds; the call that passes it is the last.
BUDGET_S = 0.25
# Large enough that a product is not held up by memory, and small enough that many fit into the budget.
MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of large square matrices in `dtype`, with the threads that this process has.

    The random numbers have a generator of their own, so nothing else changes by it.
    """
    size = MATRIX_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return best_rate(multiply, 2.0 * size**3)


def best_rate(work: Callable[[], None], operations: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second of the fastest of repeated calls: others were disturbed, or were the first."""
    begin = stop = clock()
    fastest = float("inf")
    while stop - begin < BUDGET_S:
        start = stop
        work()
        stop = clock()
        fastest = min(fastest, stop - start)
    return operations / fastest
