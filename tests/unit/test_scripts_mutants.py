"""The script that plants this domain's errors finds them where they can be, and its list of exceptions is current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
assert _spec is not None and _spec.loader is not None
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)


def planted(expression: str) -> set[str]:
    """All mutants of one expression, as the text it becomes."""
    source = f"def f():\n    return {expression}\n"
    return {
        mutants.apply(source, mutant).splitlines()[1].removeprefix("    return ")
        for mutant in mutants.mutants_of("a.py", source)
    }


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("-ratio", "ratio"),
        ("a - b", "(a + b)"),
        ("torch.where(mask, x, y)", "(x + 0 * y)"),
        ("flat.present(x, mask)", "flat.present(x, None)"),
        ("a / totals.tokens", "(a)"),
        ("a / totals.tokens", "a / totals.sequences"),
        ("x.detach()", "x"),
        ("x.clamp(max=high)", "x"),
        ("x.clamp(max=high)", "x.clamp(min=high)"),
        ("torch.clamp(x, low, high)", "x"),
        ("min(a, b)", "max(a, b)"),
        ("x[1:]", "x[1 + 1:]"),
        ("ratio_of(x)", "(x).exp()"),
        ("x.float()", "x"),
    ],
)
def test_error_is_planted(expression: str, expected: str) -> None:
    assert expected in planted(expression)


def test_messages_and_annotations_are_left_alone() -> None:
    source = "def f(x: min(1, 2)) -> None:\n    raise ValueError(f'{1 - 2}')\n"
    assert mutants.mutants_of("a.py", source) == []


def test_every_file_of_the_two_rooms_has_mutants_and_tests() -> None:
    assert {"algorithms/losses.py", "algorithms/kl.py", "batching/plan.py"} <= set(mutants.TESTS)
    for file, names in mutants.TESTS.items():
        assert mutants.mutants_of(file, (ROOT / "rlhf" / file).read_text()), file
        for name in names:
            assert (ROOT / "tests" / "unit" / f"test_{name.split('.py')[0]}.py").is_file(), name


def test_every_exception_matches_a_mutant_and_has_a_reason() -> None:
    keys = {
        mutant.key for file in mutants.TESTS for mutant in mutants.mutants_of(file, (ROOT / "rlhf" / file).read_text())
    }
    assert set(mutants.EQUIVALENT) <= keys and all(mutants.EQUIVALENT.values())
