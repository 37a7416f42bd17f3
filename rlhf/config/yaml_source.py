"""YAML in and out, by the YAML 1.2 core schema.

PyYAML's own rules are YAML 1.1: `1e-6` is text there, `off` is a boolean and a date is a date. Here a plain scalar is
null, true or false, an integer, a float, or text, and what is written is read back as it was. A key that stands
twice is an error, and every key keeps its line for error messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.problems import ConfigError, Problem, dotted
from rlhf.config.suggest import nearest

KeyPath = tuple[str | int, ...]

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9][0-9_]*$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"^<<$", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out twice: anchors are hard to read."""
        return True


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return int(node.value, 10)
    except ValueError as error:  # Python refuses thousands of digits
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(slots=True)
class Source:
    """A parsed configuration: its data, the line of every key, and what is wrong with the text itself."""

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(path: Path) -> Source:
    """Read a configuration file; raises `ConfigError` for one that can't be read or is not a YAML mapping."""
    name = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
        raise _refused(name, "no such file", f"Did you mean {path.with_name(near)}?" if near else "") from None
    except UnicodeDecodeError as error:
        raise _refused(name, f"not UTF-8 text: byte {error.start} can't be read") from None
    except OSError as error:
        raise _refused(name, f"can't be read: {error.strerror}") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Source:
    """Parse a configuration text; raises `ConfigError` where it is not YAML or not a mapping."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Source(name, {})
        source = Source(name, {})
        _survey(node, (), source, ())
        source.data = _unshared(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _refused(f"{name}{line}", f"not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise _refused(name, f"not valid YAML: {error}") from None
    if not isinstance(source.data, dict):
        raise _refused(name, "a configuration is a mapping of sections, such as `run: {name: try1}`")
    return source


def parse_value(text: str) -> Any:
    """The value of a command-line override, by the same rules as the file's; raises `yaml.YAMLError`."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    scratch = Source("", {})
    _survey(node, (), scratch, ())
    if scratch.problems:
        raise yaml.YAMLError(scratch.problems[0].rule)
    return loader.construct_document(node)


def to_yaml(data: Any) -> str:
    """Plain data as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)


def _survey(node: yaml.Node, path: KeyPath, source: Source, above: tuple[yaml.Node, ...]) -> None:
    """Note the line of every key below `node`, and keys that stand twice."""
    if node in above:
        raise yaml.MarkedYAMLError(problem="an alias refers to itself", problem_mark=node.start_mark)
    seen: dict[str | int, int] = {}
    for key, line, child in _children(node):
        here = (*path, key)
        if key in seen:
            rule = f"this key stands twice; the first one is on line {seen[key]}"
            source.problems.append(Problem(dotted(here), rule, place=f"{source.name}:{line}"))
        seen[key] = line
        source.lines[here] = line
        _survey(child, here, source, (*above, node))


def _children(node: yaml.Node) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """Key, line and value node of each entry; indices stand for the keys of a list."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield index, item.start_mark.line + 1, item
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                yield key.value, key.start_mark.line + 1, value


def _unshared(value: Any) -> Any:
    """A copy in which two aliases of one anchor are two values, so that an override changes one of them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _refused(place: str, rule: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem("", rule, hint=hint, place=place)])
