"""What is wrong with a configuration, said to the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf.config.redaction import redact

ABSENT = object()
COMMAND_LINE = "command line"

_MAX_VALUE_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One refused key: where it stands, its value, the rule that it breaks, and what to do."""

    key: str
    rule: str
    value: object = ABSENT
    hint: str = ""
    place: str = ""

    def __str__(self) -> str:
        value = "" if self.value is ABSENT else f" = {shown(self.key, self.value)}"
        parts = [f"{self.place}: " if self.place else "", f"{self.key}{value}: " if self.key else "", self.rule]
        return "".join(parts) + (f". {self.hint}" if self.hint else "")


class ConfigError(ValueError):
    """A configuration was refused; `problems` has everything that is wrong with it, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        heading = f"configuration refused, {count} error{'s' if count != 1 else ''}:"
        super().__init__("\n".join([heading, *(f"  {problem}" for problem in self.problems)]))


def shown(key: str, value: object) -> str:
    """A value as an error message shows it: short, and without secrets."""
    text = repr(redact(value, key=key.rpartition(".")[2]))
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."


def dotted(path: Iterable[str | int]) -> str:
    """A key path as users write it: `reward.functions.0.weight`."""
    return ".".join(str(part) for part in path)
