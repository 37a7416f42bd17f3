"""What is wrong with the data, said to the person who supplied it."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 5


class DataError(ValueError):
    """The data can't be used. The message names file, line and field, or prompt id, and the remedy."""


def listed(problems: Sequence[str]) -> str:
    """The first few problems, and how many more there are."""
    shown = [f"  {problem}" for problem in problems[:_SHOWN]]
    rest = len(problems) - len(shown)
    return "\n".join([*shown, *([f"  and {rest} more"] if rest else [])])
