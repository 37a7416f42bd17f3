"""From plain data to a `Config`, or to everything that is wrong with it in words for users.

Each problem carries the key path it concerns. Rules between fields need a whole configuration, so what is invalid
is left out and the rest is completed with defaults: a file's errors come all at once, of either kind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhf.config import keys
from rlhf.config.problems import ABSENT, Problem, dotted
from rlhf.config.schema import Config
from rlhf.config.suggest import nearest, nearest_key

KeyPath = tuple[str | int, ...]
Located = tuple[KeyPath, Problem]

# Stand-ins for required parts that are missing or invalid, so that the rest can be looked at.
_PROMPTS = {"source": "reasoning_gym", "task": "chain_sum"}
_FUNCTIONS = [{"name": "reasoning_gym"}]
_STAND_INS: dict[KeyPath, Any] = {
    ("data", "prompts"): _PROMPTS,
    ("evaluation", "prompts"): _PROMPTS,
    ("reward", "functions"): _FUNCTIONS,
    ("reward", "model"): {"path": "organisation/name"},
    ("policy", "lora"): {"rank": 16},
}
_REQUIRED: dict[KeyPath, Any] = {("data", "prompts"): _PROMPTS, ("reward",): {"functions": _FUNCTIONS}}


def validate(data: Mapping[str, Any]) -> tuple[Config | None, list[Located]]:
    """The configuration, or None and the problems, each with its key path."""
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        found: dict[KeyPath, Problem] = {}
        for detail in error.errors(include_url=False):
            for path, problem in _explain(detail, data):
                found.setdefault(path, problem)
        return None, list(found.items())


def without(data: Mapping[str, Any], invalid: list[KeyPath]) -> Config | None:
    """The configuration that remains when the invalid keys are left out; None if none does."""
    rest = copy.deepcopy(dict(data))
    for path in invalid:
        part = part_of(path)
        if part is not None:
            _put(rest, part, _STAND_INS[part])
        else:
            _remove(rest, path)
    for path, stand_in in _REQUIRED.items():
        if value_at(rest, path) is ABSENT:
            _put(rest, path, stand_in)
    return validate(rest)[0]


def part_of(path: KeyPath) -> KeyPath | None:
    """The part with a stand-in that this key belongs to, if any."""
    return next((part for part in _STAND_INS if path[: len(part)] == part), None)


def value_at(data: Any, path: KeyPath) -> Any:
    """What the data has at a key path, or `ABSENT`."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return data


def _explain(detail: ErrorDetails, data: Mapping[str, Any]) -> Iterator[Located]:
    path = keys.key_path(detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "invalid_key" or detail["loc"][-1] == "[key]":
        path = tuple(part for part in path if part != "[key]")
        yield path, Problem(dotted(path), "a key must be text: put it in quotes")
    elif kind == "extra_forbidden":
        yield from _unknown(path, value)
    elif kind == "missing":
        yield path, Problem(dotted(path), "this key is required and missing")
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        here = (*path, detail["ctx"]["discriminator"].strip("'"))
        tag = value_at(data, here)
        yield here, _outside(here, tag)
    elif (field := keys.field_at(path)) is not None and keys.choices(field.annotation):
        yield path, _outside(path, value)
    else:
        yield path, Problem(dotted(path), _rule(detail), value, _hint(kind, value))


def _unknown(path: KeyPath, value: Any) -> Iterator[Located]:
    """An unknown key; for an unknown section each of its keys, since each may belong somewhere else."""
    if isinstance(value, Mapping) and value and not keys.field_at(path):
        for name, inner in value.items():
            yield from _unknown((*path, name), inner)
        return
    parts = tuple("0" if isinstance(part, int) else str(part) for part in path)
    near = nearest_key(parts, keys.valid_keys())
    if near is not None:
        hint = f"Did you mean {'.'.join(near)}?"
    else:
        section = keys.field_at(path[:-1]) if path[:-1] else None
        annotation = section.annotation if section is not None else Config
        names = [name for member in keys.members(annotation) for name, _ in keys.fields(member)]
        hint = f"Valid here: {', '.join(dict.fromkeys(names))}" if names else ""
    yield path, Problem(dotted(path), "unknown key", value, hint)


def _outside(path: KeyPath, value: Any) -> Problem:
    """A value that is not among the allowed ones, or the missing kind of a union."""
    if value is ABSENT:
        return Problem(dotted(path), "this key is required and missing", hint=f"One of: {', '.join(_allowed(path))}")
    field = keys.field_at(path)
    number = " or a number" if field is not None and keys.allows_number(field.annotation) else ""
    allowed = _allowed(path)
    near = nearest(value, allowed) if isinstance(value, str) else None
    hint = f"Did you mean {near}?" if near else ""
    return Problem(
        dotted(path), f"must be {'one of: ' if len(allowed) > 1 else ''}{', '.join(allowed)}{number}", value, hint
    )


def _allowed(path: KeyPath) -> list[str]:
    """Allowed values at a path, over all kinds of the section above it."""
    above = keys.field_at(path[:-1]) if path[:-1] else None
    sections = keys.members(above.annotation) if above is not None else (Config,)
    name = str(path[-1])
    return [str(c) for s in sections if name in s.model_fields for c in keys.choices(s.model_fields[name].annotation)]


def _rule(detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a mapping of keys to values"
    if detail["type"] == "string_pattern_mismatch":
        return "must be letters, digits, '.', '_' and '-', and begin with a letter or digit: it names a folder"
    return re.sub(r"^(?:Input|List|String|Value) should", "must", detail["msg"])


def _hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f"For the text, put it in quotes: '{value}'"
    if kind == "list_type" and isinstance(value, str):
        return f"A list is written [{value!r}]"
    return ""


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        inner = data.get(str(part))
        if not isinstance(inner, dict):
            inner = data[str(part)] = {}
        data = inner
    data[str(path[-1])] = copy.deepcopy(value)


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    above = value_at(data, path[:-1])
    if isinstance(above, dict):
        above.pop(path[-1], None)
        if not above and path[:-1] and keys.field_at(path[:-1]) is None:
            _remove(data, path[:-1])
    elif isinstance(above, list):
        _remove(data, path[:-1])
