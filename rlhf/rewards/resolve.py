"""From the names in a configuration to functions, and every mistake found before anything starts.

A name is one of the functions that were handed in from Python, a built-in, `module:function`, or
`path/to/file.py:function`. `check_functions` runs in the driver and reports all problems at once; worker processes
call `resolve` on the same names.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.rewards.builtin import BUILT_IN, check_options
from rlhf.rewards.types import RewardError, RewardFunction

if TYPE_CHECKING:
    from rlhf.config.schema import RewardFunctionConfig


class UnknownFunction(RewardError):
    """A name that leads to no function. The message says why and what is valid."""


def resolve(name: str, base_dir: str | Path | None = None) -> RewardFunction:
    """The function that `name` stands for; relative file names start at `base_dir` (default: the current folder).

    Raises `UnknownFunction` with the nearest valid name, or with the user's own error when the module can't be
    imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UnknownFunction(
            f"not a reward function{_did_you_mean(name, BUILT_IN)}; use one of {', '.join(BUILT_IN)}, "
            "`module:function` or `path/to/file.py:function`"
        )
    # Imported here, for it brings pydantic with it: a worker with built-in functions starts without.
    from rlhf.config import functions

    try:
        return functions.resolve_function(name, base_dir)
    except functions.UnknownFunction as error:
        raise UnknownFunction(str(error)) from error


def function_keys(names: Sequence[str]) -> list[str]:
    """One key for each function, under which its scores are reported.

    It is the name, of a file only its last part (`mine.py:brevity`), then `name#2` for the same again.
    """
    short = [name.rpartition("/")[2] for name in names]
    return [name if (nth := short[: i + 1].count(name)) == 1 else f"{name}#{nth}" for i, name in enumerate(short)]


def with_custom(
    functions: Sequence[RewardFunctionConfig], custom: Mapping[str, Any] | Sequence[str]
) -> list[RewardFunctionConfig]:
    """The configured functions, and after them with weight 1 the custom ones that no entry names."""
    from rlhf.config.schema import RewardFunctionConfig

    named = {function.name for function in functions}
    return [*functions, *(RewardFunctionConfig(name=name) for name in custom if name not in named)]


def check_functions(
    functions: Sequence[RewardFunctionConfig],
    custom: Mapping[str, RewardFunction] | None = None,
    base_dir: str | Path | None = None,
) -> list[str]:
    """All problems of `reward.functions`, each with its key path, value, rule and remedy; an empty list when it's fine.

    `custom` are the functions handed in from Python, by name; they may be named in the configuration, with weight and
    options, and come before a built-in of the same name.
    """
    problems = []
    for index, entry in enumerate(with_custom(functions, custom or {})):
        path = f"reward.functions.{index}"
        try:
            function = (custom or {}).get(entry.name) or resolve(entry.name, base_dir)
        except UnknownFunction as error:
            problems.append(f"{path}.name: {entry.name!r}: {error}")
            continue
        found = _check_call(path, entry.name, function, entry.options)
        if function is BUILT_IN.get(entry.name) and not found and (wrong := check_options(entry.name, entry.options)):
            found = [f"{path}.options: {wrong}"]
        problems += found
    return problems


def _check_call(path: str, name: str, function: RewardFunction, options: Mapping[str, Any]) -> list[str]:
    """Check the options against the function's signature: names, what is required, and the annotated types."""
    if not callable(function):
        return [f"{path}.name: {name!r} is a {type(function).__name__}, not a function"]
    if inspect.iscoroutinefunction(function):
        return [f"{path}.name: {name!r} is an async function: a reward function is called plainly, drop the `async`"]
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:
        return []  # a callable without a signature, e.g. written in C: nothing to check against
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    first = next(iter(parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return [f"{path}.name: {name!r} takes no samples: its first parameter must be the list of samples"]
    known = {
        key: p
        for key, p in parameters.items()
        if p is not first and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    problems = [
        f"{path}.options.{key}: {name} has no option {key!r}{_did_you_mean(key, known)}; "
        f"its options are: {', '.join(known) or 'none'}"
        for key in options
        if key not in known and not takes_any
    ]
    problems += [
        f"{path}.options: {name} needs the option {key!r}: set {path}.options.{key}"
        for key, p in known.items()
        if p.default is p.empty and key not in options
    ]
    hints = _hints(function)
    for key, value in options.items():
        if key in known and key in hints and (wrong := _check_type(value, hints[key])):
            problems.append(f"{path}.options.{key}: {value!r} {wrong}")
    return problems


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The function's annotations as types; none where they can't be evaluated."""
    try:
        return typing.get_type_hints(function)
    except Exception:  # a user's annotation may name anything
        return {}


def _check_type(value: object, hint: Any) -> str | None:
    """Why a value from YAML doesn't fit the annotation, or None; an annotation that pydantic can't check passes."""
    from pydantic import TypeAdapter, ValidationError

    try:
        adapter, text = TypeAdapter(hint), json.dumps(value)
    except Exception:  # a class of the user's own, or a YAML value that JSON lacks
        return None
    try:
        adapter.validate_json(text, strict=True)
    except ValidationError as error:
        if typing.get_origin(hint) is typing.Literal:
            valid = typing.get_args(hint)
            return f"is not one of {', '.join(map(repr, valid))}{_did_you_mean(value, valid)}"
        return f"doesn't fit {getattr(hint, '__name__', hint)}: {error.errors()[0]['msg']}"
    return None


def dump_functions(custom: Mapping[str, RewardFunction]) -> dict[str, bytes]:
    """Functions handed in from Python, in the form in which they travel to `RewardActor` and its workers."""
    from rlhf.config import functions

    dumped = {}
    for name, function in custom.items():
        try:
            dumped[name] = functions.dump_function(function)
        except Exception as error:  # pickling runs the __reduce__ of whatever the function refers to
            raise RewardError(
                f"reward function {name!r} can't be sent to its worker process: {functions.describe(error)}; make it a "
                "function of a module, and open files and connections inside it"
            ) from error
    return dumped


def _did_you_mean(value: object, known: Iterable[object]) -> str:
    from rlhf.config.functions import did_you_mean

    return did_you_mean(value, known)
