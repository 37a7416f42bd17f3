"""The training command, with a look at everything that the driver's objects hold.

    python tests/e2e/graph.py --config run.yaml …

When the run has found its beginning, and after every step, the file graph.jsonl in the working folder gets a line: for
each value reachable from the trainer its path, the name under which its object is registered for checkpoints (or an
empty text), and the value.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

Leaves = dict[str, tuple[str, str]]
PLAIN = (type(None), bool, int, float, str, bytes)
CONTAINERS = (list, tuple, set, frozenset, deque)


def leaves(root: Any, registered: Mapping[str, Any]) -> Leaves:
    """Every plain value reachable from `root`, by path: the registered name that covers it, and its text.

    A registered object covers its own values, those in its containers and in records (dataclasses), and no other
    object that it knows: that one has to be registered itself.
    """
    names = {id(obj): name for name, obj in registered.items()}
    found: Leaves = {}
    seen: set[int] = set()
    todo = deque[tuple[str, Any, str]]((name, obj, name) for name, obj in registered.items())
    todo.append(("run", root, ""))
    while todo:
        path, value, cover = todo.popleft()
        if isinstance(value, PLAIN):
            found[path] = (cover, repr(value))
        elif id(value) not in seen:
            seen.add(id(value))
            for name, inner in parts(value):
                covered = names.get(id(inner)) or (cover if is_ours(inner) in (None, "record") else "")
                todo.append((f"{path}.{name}", inner, covered))
    return found


def is_ours(value: Any) -> str | None:
    """`object` or `record` (a dataclass) of the package's own; None for anything else."""
    if not type(value).__module__.startswith("rlhf."):
        return None
    return "record" if is_dataclass(value) else "object"


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object or a container holds, by name; nothing for what is neither."""
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, CONTAINERS):
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield from ((str(index), inner) for index, inner in enumerate(ordered))
    elif is_ours(value) is not None and not type(value).__module__.startswith("rlhf.config"):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *slots]
        yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))


def main() -> int:
    from rlhf.train import main as train
    from rlhf.trainers import ppo

    file = Path("graph.jsonl")
    begin, write_behind = ppo._Run._begin, ppo.Checkpointer.write_behind
    run: Any = None
    step = 0

    def look() -> None:
        found = leaves(run, run._checkpoints.registry._objects)
        with file.open("a") as out:
            out.write(json.dumps({"step": step, "leaves": found}) + "\n")

    async def begin_and_look(begun: Any, checkpoint: Any) -> int:
        nonlocal run, step
        run, step = begun, await begin(begun, checkpoint)
        look()
        return step

    def look_and_write(checkpoints: Any) -> None:
        nonlocal step
        write_behind(checkpoints)
        step += 1
        look()

    ppo._Run._begin = begin_and_look
    ppo.Checkpointer.write_behind = look_and_write
    return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
