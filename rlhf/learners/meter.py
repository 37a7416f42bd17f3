"""Metrics of an update: sums and counts over response tokens, reduced over ranks once at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.learners.ranks import Ranks


class TokenMeter:
    """Collects per-token values by name; a mean is taken over all tokens of all ranks, a maximum as well.

    The same names have to be collected on all ranks. Sums are float64 and stay on the device until the end, so that
    collecting does not wait for it.
    """

    def __init__(self, means: tuple[str, ...], maxima: tuple[str, ...] = ()) -> None:
        self._means = means
        self._maxima = maxima
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = dict.fromkeys(means, 0)
        self._largest: dict[str, Tensor] = {}

    def add(self, name: str, values_N: Tensor) -> None:
        """Collect the values of N tokens."""
        values = values_N.detach()
        total = values.sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] += values.numel()

    def add_maximum(self, name: str, values_N: Tensor) -> None:
        """Collect the largest of N values of at least 0; a NaN counts as infinite, or a maximum could hide it."""
        if values_N.numel():
            largest = torch.nan_to_num(values_N.detach(), nan=math.inf, posinf=math.inf).max()
            self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Means and maxima over all ranks, by name; a mean over no token is absent. Collective."""
        sums = [float(self._sums[name]) if name in self._sums else 0.0 for name in self._means]
        totals = ranks.sum_of_shares([*sums, *(float(self._counts[name]) for name in self._means)])
        size = len(self._means)
        reduced = {name: totals[i] / totals[size + i] for i, name in enumerate(self._means) if totals[size + i] > 0}
        if self._maxima:
            local = [float(self._largest[name]) if name in self._largest else 0.0 for name in self._maxima]
            reduced.update(zip(self._maxima, ranks.max(local), strict=True))
        return reduced
