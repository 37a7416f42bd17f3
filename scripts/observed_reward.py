"""The reward of the runs that scripts observe; a file of its own, since reward workers import it by path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def digits(samples: Sequence[Any]) -> list[float]:
    """Digits and length both count, so that the samples of a model which has learned nothing differ."""
    return [sum(c.isdigit() for c in s.response) / 10 + len(s.response) / 100 for s in samples]
