"""Plant the errors of this domain, one at a time, and see whether the unit tests notice.

    python scripts/mutants.py                      # all, a quarter of an hour on a core
    python scripts/mutants.py losses correction    # those of some files
    python scripts/mutants.py --list

A mutation-testing package knows Python's operators and comparisons (docs/testing.md has both). This script knows what
goes wrong in reinforcement learning: a sign that is flipped, a mask that is dropped, a denominator that counts
something else, a `detach` or a bound that is missing, `min` for `max`, an end that is off by one, a cast to float32
that is left out. It finds every such place in `rlhf/algorithms` and `rlhf/batching` and runs the unit tests on a
temporary copy for each. A mutant that no test fails on has survived. Exit code 1: one survived that is not among
`EQUIVALENT`, or an entry there matches no mutant any more.
"""

from __future__ import annotations

import argparse
import ast
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("algorithms", "batching")
# They only name and re-export things, or keep functions by name: nothing is computed there.
WITHOUT_ARITHMETIC = ("__init__", "catalogue", "registry")
# The tests of a file where they are not named after it, those that fail soonest first.
TESTS_ELSEWHERE = {
    "aggregation": ["aggregation", "losses_every"],
    "controller": ["kl.py::TestController"],
    "losses": ["losses", "losses_every"],
    "tokens": ["flat_tokens", "losses", "losses_every", "correction", "kl", "value_loss"],
    "value": ["value_loss"],
}


def find_tests() -> dict[str, list[str]]:
    """For each file of the two rooms, by its path below rlhf/, the names of its tests."""
    found = {}
    for room in ROOMS:
        prefix = "" if room == "algorithms" else f"{room}_"
        for path in sorted((ROOT / "rlhf" / room).glob("*.py")):
            if path.stem not in WITHOUT_ARITHMETIC:
                found[f"{room}/{path.name}"] = TESTS_ELSEWHERE.get(path.stem, [prefix + path.stem])
    return found


TESTS = find_tests()
# A mutant that takes this many times the processor time that the tests take without one hangs: it is killed and counts
# as noticed. By the clock, any mutant could seem to hang on a machine that has other work.
PATIENCE = 10


@dataclass(frozen=True)
class Mutant:
    """One edit: in `file`, below rlhf/, the text between two offsets becomes `after`."""

    file: str
    function: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """What tells it apart from others, without line numbers, which move."""
        return f"{self.file} {self.function}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


# Mutants that change no result that anyone may rely on, each with the reason.
EQUIVALENT: dict[str, str] = {
    "algorithms/losses.py dppo: inputs.log_ratio_N.detach() -> inputs.log_ratio_N": "it is only compared with 0, and "
    "comparisons carry no gradient; the detach says so",
    "algorithms/advantages.py opo: batch.lengths_S.double() -> batch.lengths_S": "sums of integers are exact, and the "
    "quotient is float64 by its numerator",
    "algorithms/advantages.py maxrl: batch.rewards_S -> batch.sequence_rewards_S": "it refuses "
    "penalties, so the two are equal",
    "algorithms/advantages.py _Groups.sizes: torch.bincount(self.members, minlength=self.count).double() -> "
    "torch.bincount(self.members, minlength=self.count)": "integers, by which float64 is divided or multiplied",
    "algorithms/advantages.py _Groups.root_mean_squares: values.abs() -> values": "only the unit of the sum: "
    "deviations from a mean have a positive maximum wherever they are not all 0",
    "algorithms/correction.py correct: flat.present(old_N, mask_N) -> flat.present(old_N, None)": "absent slots are "
    "emptied again after the ratio, in sums too, and nothing here has a gradient",
    "algorithms/correction.py correct: flat.present(engine_N, mask_N) -> flat.present(engine_N, None)": "as for old_N",
    "algorithms/correction.py _bounded: torch.where(ratio_N.isnan(), ratio_N, torch.ones_like(ratio_N)) -> "
    "(torch.ones_like(ratio_N) + 0 * ratio_N)": "the ratio is finite or NaN, so this is the same function",
    "batching/packing.py _Shares._candidates: :PARTNERS -> : PARTNERS + 1": "one more rank to look at: a matter of "
    "time, and no stated invariant depends on their number",
}

Edit = tuple[str, str]
SWAPPED = {
    "min": "max",
    "max": "min",
    "amax": "amin",
    "tokens": "sequences",
    "sequences": "max_new_tokens",
    "max_new_tokens": "tokens",
    "low": "high",
    "high": "low",
    "sum_w": "sum_w2",
}
REWARDS = {"rewards_S": "sequence_rewards_S", "sequence_rewards_S": "rewards_S"}
DROPPED_METHODS = {"detach", "float", "double", "clamp", "abs", "square", "sqrt", "exp", "log", "clone"}
MASKED = {"present": 2, "sequence_sum": 4, "sequence_mean": 4}


def edits(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[Edit]:
    """Kind and new text of every error that can be planted at this node."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "flipped sign", text(operand)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield "flipped sign", f"({text(left)} + {text(right)})"
            yield "left out", f"({text(left)})"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "flipped sign", f"({text(left)} - {text(right)})"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            yield "left out", f"({text(left)})"
            yield "left out", f"({text(right)})"
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv()):
            yield "no denominator", f"({text(left)})"
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int() | float() as value) if value in (1, 2):
            yield "off by one", repr(value - 1)
        case ast.Slice(lower=ast.expr() as lower, upper=None):
            yield "off by one", f"{text(lower)} + 1:"
        case ast.Slice(lower=None, upper=ast.expr() as upper):
            yield "off by one", f": {text(upper)} + 1"
        case ast.Attribute(value=ast.Name(id="batch") as value, attr=attr) if attr in REWARDS:
            yield "swapped", f"{text(value)}.{REWARDS[attr]}"
        case ast.Attribute(value=value, attr=attr) if attr in SWAPPED:
            yield "swapped", f"{text(value)}.{SWAPPED[attr]}"
        case ast.Call():
            yield from call_edits(node, text)


def call_edits(node: ast.Call, text: Callable[[ast.AST], str]) -> Iterator[Edit]:
    """The same for a call: a mask, a bound, a detach or a cast that is missing, min for max."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    arguments = [text(argument) for argument in node.args]
    if isinstance(node.func, ast.Name) and name in ("min", "max"):
        yield "swapped", f"{SWAPPED[name]}({', '.join([*arguments, *map(text, node.keywords)])})"
    if name == "where" and len(arguments) == 3:
        yield "no mask", f"({arguments[1]} + 0 * {arguments[2]})"
        yield "no mask", f"({arguments[2]} + 0 * {arguments[1]})"
    if name in MASKED and len(arguments) == MASKED[name]:
        yield "no mask", f"{text(node.func)}({', '.join([*arguments[:-1], 'None'])})"
    if name == "clamp" and ast.unparse(node.func) == "torch.clamp":
        yield "no bound", arguments[0]
    elif name in DROPPED_METHODS and isinstance(node.func, ast.Attribute):
        yield f"no {name}", text(node.func.value)
    if name == "ratio_of":
        yield "no bound", f"({arguments[0]}).exp()"
    if name == "finite_logprobs":
        yield "no bound", f"({arguments[0]}).float()"
        yield "no float", f"({arguments[0]}).clamp(-1e4, 1e4)"
    for keyword in node.keywords:
        if keyword.arg in ("min", "max") and name == "clamp":
            kept = [*arguments, f"{SWAPPED[keyword.arg]}={text(keyword.value)}"]
            yield "swapped", f"{text(node.func)}({', '.join(kept)})"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.keyword | ast.Slice)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        start, stop = span(node)
        return raw[start:stop].decode()

    found: dict[tuple[int, int, str], Mutant] = {}

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        # Types, messages and what a decorator says are no arithmetic.
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg):
            return
        if function:
            for kind, after in edits(node, text):
                start, stop = span(node)
                before = raw[start:stop].decode()
                mutant = Mutant(file, function, node.lineno, kind, start, stop, before, after)  # type: ignore[attr-defined]
                found.setdefault((start, stop, after), mutant)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function)

    visit(ast.parse(source), "")
    return [mutant for mutant in found.values() if compiles(apply(source, mutant))]


def apply(source: str, mutant: Mutant) -> str:
    """The file's text with the edit."""
    raw = source.encode()
    return (raw[: mutant.start] + mutant.after.encode() + raw[mutant.stop :]).decode()


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Outcome(Enum):
    """What the tests say of a mutant."""

    PASSED = "SURVIVED"
    FAILED = "killed"
    HUNG = "killed, hangs"


def run_tests(file: str, limit_s: int | None) -> tuple[Outcome, float]:
    """Run a file's tests in a fork that has `limit_s` seconds of processor time; the outcome, and how many it took."""
    names = [f"tests/unit/test_{name if '::' in name else name + '.py'}" for name in TESTS[file]]
    child = os.fork()
    if child == 0:
        if limit_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
        os._exit(int(pytest.main([*options, *names])))
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and code != -signal.SIGXCPU:
        raise SystemExit(f"the tests of {file} were ended by signal {-code}, which says nothing of the mutant")
    outcome = Outcome.PASSED if code == 0 else Outcome.HUNG if code < 0 else Outcome.FAILED
    return outcome, used.ru_utime + used.ru_stime


def enter_copy(copy: Path) -> None:
    """Copy what the tests need, and make this process import the package from there."""
    for name in ("rlhf", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    os.chdir(copy)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    # Loaded once and inherited by every fork. The two rooms themselves must not be among it.
    import hypothesis
    import numpy
    import pytest
    import torch
    import transformers  # noqa: F401  tests/conftest.py needs it

    import rlhf.config.schema
    import rlhf.trajectories

    torch.set_num_threads(1)
    # The same examples for every mutant, for speed fewer than the tests take by themselves, and none is shrunk.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", max_examples=20, derandomize=True, deadline=None, database=None, phases=phases
    )
    loaded = (hypothesis, numpy, pytest, rlhf.config.schema, rlhf.trajectories)
    assert all(loaded) and Path(rlhf.__file__ or "").is_relative_to(copy)
    for name in [name for name in sys.modules if name.startswith(("rlhf.algorithms", "rlhf.batching"))]:
        del sys.modules[name]


def try_all(wanted: Sequence[Mutant]) -> list[Mutant]:
    """Try each; print what became of it; return the survivors."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        enter_copy(copy)
        limits: dict[str, int] = {}
        for number, mutant in enumerate(wanted, 1):
            path = copy / "rlhf" / mutant.file
            source = path.read_text()
            if mutant.file not in limits:
                outcome, took = run_tests(mutant.file, None)
                if outcome is not Outcome.PASSED:
                    raise SystemExit(
                        f"the tests of {mutant.file} fail without a mutant: {', '.join(TESTS[mutant.file])}"
                    )
                limits[mutant.file] = ceil(PATIENCE * took)
            path.write_text(apply(source, mutant))
            outcome, _ = run_tests(mutant.file, limits[mutant.file])
            path.write_text(source)
            if outcome is Outcome.PASSED:
                survivors.append(mutant)
            fate = "equivalent" if outcome is Outcome.PASSED and mutant.key in EQUIVALENT else outcome.value
            print(f"{number}/{len(wanted)} {fate}: {mutant.kind}, line {mutant.line}: {mutant.key}", flush=True)
    return survivors


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants of the named files, or of all; return 1 when one survives unexplained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", help="names like losses or plan; without any: all")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.files) - {Path(file).stem for file in TESTS}
    if unknown:
        parser.error(f"no file {', '.join(sorted(unknown))}: use {', '.join(Path(file).stem for file in TESTS)}")
    files = [file for file in TESTS if not arguments.files or Path(file).stem in arguments.files]
    wanted = [mutant for file in files for mutant in mutants_of(file, (ROOT / "rlhf" / file).read_text())]
    if arguments.list:
        for mutant in wanted:
            print(f"{mutant.kind}, line {mutant.line}: {mutant.key}")
        print(f"{len(wanted)} mutants")
        return 0
    stale = {key for key in EQUIVALENT if key.split()[0] in files} - {mutant.key for mutant in wanted}
    survivors = try_all(wanted)
    unexplained = [mutant for mutant in survivors if mutant.key not in EQUIVALENT]
    print(
        f"{len(wanted)} mutants: {len(wanted) - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} equivalent, {len(unexplained)} survived"
    )
    for mutant in unexplained:
        print(f"survived: {mutant.key}")
    for key in sorted(stale):
        print(f"no mutant matches any more: {key}")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
