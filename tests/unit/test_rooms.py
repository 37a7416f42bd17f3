"""Each room imports only what the design's table allows, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlhf"

# What every room but `config` may import. `cluster.process` ties a process to the life of its parent, which rooms that
# start processes of their own need, `cluster.disk` syncs what the rooms that write files have written, and
# `cluster.ports` is for those whose processes meet.
COMMON = {"config", "trajectories", "tracking.spans"} | {
    f"cluster.{name}" for name in ("wait", "process", "disk", "ports")
}
# What a room may import besides. A room that is not listed, or a file outside the rooms, is a mistake.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "trajectories": set(),
    "data": set(),
    "algorithms": set(),
    "batching": set(),
    "models": {"batching"},
    "weights": set(),
    "cluster": set(),
    "learners": {"algorithms", "batching", "models", "weights"},
    "scorers": {"batching", "models"},
    "rewards": set(),
    "rollout": {"weights"},
    "checkpoint": set(),
    "tracking": set(),
    "trainers": {
        "checkpoint",
        "data",
        "algorithms",
        "batching",
        "models",
        "weights",
        "cluster",
        "learners",
        "scorers",
        "rewards",
        "rollout",
        "tracking",
    },
}
COMMANDS = {"train.py", "__init__.py"}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of this package, inside functions and for types as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            # `from rlhf.tracking import spans` imports rlhf.tracking.spans as well as rlhf.tracking.
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.removeprefix("rlhf.")) for name in found if name.startswith("rlhf."))


def is_allowed(room: str, module: str) -> bool:
    targets = {room, *ALLOWED[room], *(COMMON if room != "config" else ())}
    return any(module == target or module.startswith(f"{target}.") for target in targets)


def test_rooms_import_only_what_the_design_allows() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports rlhf.{module}"
        for room in ALLOWED
        for file in sorted((PACKAGE / room).rglob("*.py"))
        for line, module in imports(file)
        if not is_allowed(room, module)
    ]
    assert wrong == []


def test_every_file_of_the_package_is_in_a_room() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ALLOWED)
    assert {path.name for path in PACKAGE.glob("*.py")} <= COMMANDS


def test_the_check_sees_what_is_not_allowed(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f():\n    from rlhf.tracking import spans, console\n    import rlhf.cluster.needs\n")
    found = dict.fromkeys(module for _, module in imports(file))
    assert {module: is_allowed("data", module) for module in found} == {
        "tracking.spans": True,
        "tracking.console": False,
        "cluster.needs": False,
    }


@pytest.mark.parametrize("module", ["rlhf", "rlhf.config", "rlhf.train", "rlhf.data", "rlhf.algorithms.catalogue"])
def test_importing_is_light(module: str) -> None:
    heavy = ("torch", "ray", "vllm", "transformers", "deepspeed", "flash_attn")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
