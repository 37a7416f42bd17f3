"""Load a configuration: file, overrides, types, rules, files; all errors of it at once.

Invariants
- Nothing is dropped or repaired in silence: what is written is what runs, or it is refused.
- Every problem names its place (file and line, or the command line), key, value, rule and, where there is one, the
  nearest valid name.
- A loaded configuration has absolute paths and can be handed to any process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlhf.config import files, rules
from rlhf.config.catalogue import has_reference_pool
from rlhf.config.problems import COMMAND_LINE, ConfigError, Problem, dotted
from rlhf.config.redaction import redact
from rlhf.config.schema import Config
from rlhf.config.validation import KeyPath, Located, part_of, validate, without
from rlhf.config.yaml_source import Source, parse_value, read_yaml, to_yaml


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> Config:
    """Load a YAML file, apply `section.key=value` overrides, and check everything.

    `check_files=False` leaves out what depends on this machine's disk (model folder, data and reward files, the run
    folder), for tools that only read configurations. Raises `ConfigError` with all problems.
    """
    return _build(read_yaml(Path(path)), overrides, check_files=check_files)


def config_from_dict(data: Mapping[str, Any], *, check_files: bool = True) -> Config:
    """The same checks for a configuration that was built in Python; raises `ConfigError` with all problems."""
    return _build(Source("", copy.deepcopy(dict(data))), (), check_files=check_files)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, with secrets redacted; loading it gives the same configuration."""
    data = config.model_dump(mode="python")
    if not has_reference_pool(config):
        # A section without effect is refused at load.
        del data["reference"]
    return to_yaml(redact(data))


def _build(source: Source, overrides: Sequence[str], *, check_files: bool) -> Config:
    overridden: set[KeyPath] = set()
    located: list[Located] = []
    problems = list(source.problems)
    for override in overrides:
        problems += _apply(override, source, overridden)
    config, invalid = validate(source.data)
    located += invalid
    whole = config if config is not None else without(source.data, [path for path, _ in invalid])
    if whole is not None:
        found = rules.check(whole) + (files.check_files(whole) if check_files else [])
        located += _unless_known(found, [path for path, _ in invalid])
    problems += [_placed(path, problem, source, overridden) for path, problem in located]
    if problems or config is None:
        raise ConfigError(sorted(problems, key=_order))
    return files.resolve_paths(config)


def _apply(override: str, source: Source, overridden: set[KeyPath]) -> Iterator[Problem]:
    """Put one `section.key=value` into the data; the last of two for the same key wins."""
    name, equals, text = override.partition("=")
    if not equals or not name or not all(name.split(".")):
        yield Problem("", f"{override!r} is not an override", hint="Write section.key=value", place=COMMAND_LINE)
        return
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        yield Problem(name, f"the value is not valid YAML: {reason}", text, "Quote it", place=COMMAND_LINE)
        return
    *above, last = name.split(".")
    here: Any = source.data
    path: KeyPath = ()
    for part in above:
        here, path = _step_into(here, part, path)
        if here is None:
            yield Problem(name, f"{dotted(path)} has no keys or items to set", place=COMMAND_LINE)
            return
    if isinstance(here, list):
        if not last.isdigit() or int(last) >= len(here):
            yield Problem(name, f"{dotted(path)} is a list of {len(here)}: no item {last}", value, place=COMMAND_LINE)
            return
        path = (*path, int(last))
        here[int(last)] = value
    else:
        path = (*path, last)
        here[last] = value
    overridden.add(path)
    for known in [known for known in source.lines if known[: len(path)] == path]:
        del source.lines[known]


def _step_into(here: Any, part: str, path: KeyPath) -> tuple[Any, KeyPath]:
    """The mapping or list at `part`, made where there is none yet; None where something else stands there."""
    if isinstance(here, list):
        index = int(part) if part.isdigit() else len(here)
        inner = here[index] if index < len(here) else None
        return (inner if isinstance(inner, dict | list) else None), (*path, index)
    inner = here.get(part)
    if inner is None:
        inner = here[part] = {}
    return (inner if isinstance(inner, dict | list) else None), (*path, part)


def _unless_known(found: list[Problem], invalid: list[KeyPath]) -> Iterator[Located]:
    """Rule problems, without those of keys that are refused already and that a stand-in answered for."""
    stood_in = [part_of(path) or path for path in invalid]
    for problem in found:
        path = tuple(int(part) if part.isdigit() else part for part in problem.key.split("."))
        if not any(path[: len(known)] == known or known[: len(path)] == path for known in stood_in):
            yield path, problem


def _placed(path: KeyPath, problem: Problem, source: Source, overridden: set[KeyPath]) -> Problem:
    """The problem with the place where its key, or the nearest section above it, was written."""
    for length in range(len(path), 0, -1):
        if path[:length] in overridden:
            return replace(problem, place=COMMAND_LINE)
        if path[:length] in source.lines:
            return replace(problem, place=f"{source.name}:{source.lines[path[:length]]}")
    below = any(key[: len(path)] == path for key in overridden)
    return replace(problem, place=COMMAND_LINE if below else source.name)


def _order(problem: Problem) -> tuple[bool, int]:
    """By line, the command line last."""
    line = problem.place.rpartition(":")[2]
    return problem.place == COMMAND_LINE, int(line) if line.isdigit() else 0
