"""The schema as a tree of keys: what error messages, suggestions and the documentation walk over."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rlhf.config.schema import Config, Section


def members(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that a value of this type may be: one, the kinds of a union, or the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if get_origin(annotation) in (Union, types.UnionType, list, typing.Annotated):
        return tuple(section for argument in get_args(annotation) for section in members(argument))
    return ()


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a `Literal`, alone or in a union, allows."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(value for argument in get_args(annotation) for value in choices(argument))
    return ()


def allows_number(annotation: Any) -> bool:
    """Whether a union allows a number besides its fixed values."""
    return any(float in (argument, *get_args(argument)) for argument in get_args(annotation))


def is_list(annotation: Any) -> bool:
    """Whether the value is a list, whose items have indices for keys."""
    return get_origin(annotation) is list


def kind_of(section: type[Section], discriminator: str) -> str:
    """The value of the discriminating key that chooses this kind, e.g. `jsonl`."""
    return str(get_args(section.model_fields[discriminator].annotation)[0])


def fields(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a section, in order."""
    yield from section.model_fields.items()


@cache
def valid_keys() -> tuple[tuple[str, ...], ...]:
    """Every key path of the schema; an item of a list stands as `0`."""
    return tuple(dict.fromkeys(_below(Config, ())))


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """The schema's field at a key path, or None where the schema has none."""
    sections: tuple[type[Section], ...] = (Config,)
    found = None
    for part in path:
        if isinstance(part, int):
            continue
        found = next((s.model_fields[part] for s in sections if part in s.model_fields), None)
        if found is None:
            return None
        sections = members(found.annotation)
    return found


def key_path(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """A pydantic error location as a key path.

    pydantic puts in the kind that it chose for a union; no user wrote that as a key.
    """
    path: list[str | int] = []
    sections: tuple[type[Section], ...] = (Config,)
    field: FieldInfo | None = None
    parts = iter(location)
    for part in parts:
        path.append(part)
        if isinstance(part, int):
            continue
        field = next((s.model_fields[part] for s in sections if part in s.model_fields), None)
        if field is None:
            break
        sections = members(field.annotation)
        if field.discriminator is not None:
            next(parts, None)
        elif choices(field.annotation):
            break
    # What is left after an unknown key or a union of plain values is pydantic's own, not a key.
    return tuple(path)


def _below(section: type[Section], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in fields(section):
        here = (*above, name)
        yield here
        for member in members(field.annotation):
            yield from _below(member, (*here, "0") if is_list(field.annotation) else here)
