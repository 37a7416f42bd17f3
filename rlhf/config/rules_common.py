"""What all rules share: their type, and how they say that a key has no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlhf.config.problems import ABSENT, Problem
from rlhf.config.schema import Config, Section

Rule = Callable[[Config], Iterator[Problem]]


def is_set(section: Section, key: str) -> bool:
    """Whether a key has another value than its default; a default that is restated promises nothing."""
    field = type(section).model_fields[key]
    return bool(getattr(section, key) != field.get_default(call_default_factory=True))


def unused(config: Config, keys: Iterable[str], reason: str, hint: str) -> Iterator[Problem]:
    """A problem for each of the dotted `keys` that is set, since `reason` takes its effect away."""
    for key in keys:
        above, _, name = key.rpartition(".")
        if is_set(_value_at(config, above), name):
            yield problem(config, key, f"has no effect {reason}", hint)


def problem(config: Config, key: str, rule: str, hint: str) -> Problem:
    """A problem of a key with the value that it has; sections are not shown."""
    value = _value_at(config, key)
    return Problem(key, rule, value if isinstance(value, str | int | float) else ABSENT, hint)


def _value_at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else value[part] if isinstance(value, dict) else getattr(value, part)
    return value
