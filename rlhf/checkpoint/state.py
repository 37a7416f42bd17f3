"""The driver's own state: everything stateful registers itself, and all of it is one strict JSON file.

Invariants
- What is registered when a checkpoint is written and what is registered when it is read are the same names; a
  missing or a surplus one is an error that names it, and nothing is loaded.
- Values come back as they were: whole numbers of any size, floats to the last bit. What JSON would change (a tuple, a
  NaN, a key that is no text) is refused when it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhf.checkpoint.errors import StateError, explain_write

DRIVER_STATE = "driver.json"


class Stateful(Protocol):
    """Whatever has to be as it was when a run goes on."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, as plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state that `state_dict` gave."""
        ...


class StateRegistry:
    """The stateful objects of a process, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def register(self, name: str, obj: Stateful) -> None:
        """Make the object part of every checkpoint. Raises `StateError` when the name is taken."""
        if name in self._objects:
            raise StateError(f"a state named {name!r} is registered already")
        self._objects[name] = obj

    def save(self, path: Path) -> None:
        """Write the state of all objects as it is now. Raises `StateError` for what JSON can't give back."""
        states = {name: _exact(obj.state_dict(), name) for name, obj in self._objects.items()}
        with explain_write(path):
            path.write_text(json.dumps(states, allow_nan=False, indent=1) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Give every object its state back. Raises `StateError` when the file holds other names than are registered."""
        try:
            states = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"{path} can't be read: {error}") from error
        self._compare(path, states)
        for name, obj in self._objects.items():
            obj.load_state_dict(states[name])

    def _compare(self, path: Path, states: Any) -> None:
        saved = set(states) if isinstance(states, dict) else set()
        missing, surplus = sorted(self._objects.keys() - saved), sorted(saved - self._objects.keys())
        if missing or surplus:
            parts = [f"it lacks {', '.join(missing)}"] if missing else []
            parts += [f"it has {', '.join(surplus)}, which nothing here takes"] if surplus else []
            raise StateError(f"{path} holds the state of another run: {'; '.join(parts)}")


def _exact(value: Any, where: str) -> Any:
    """The value as JSON gives it back; `where` names it in the error."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise StateError(f"state {where} is {value}, and JSON has no word for it: use None")
    if isinstance(value, list):
        return [_exact(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StateError(f"state {where} has the key {key!r}, and JSON would make text of it")
        return {key: _exact(item, f"{where}.{key}") for key, item in value.items()}
    raise StateError(
        f"state {where} is a {type(value).__name__}, which JSON can't give back: use lists and plain values"
    )
