"""The suite itself: it can be collected in one go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_file_has_a_name_of_its_own() -> None:
    # pytest imports them by that name alone, and refuses to run anything when two are the same.
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
