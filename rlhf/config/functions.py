"""Functions of the user's own, by `module:function` or `path/to/file.py:function`: rewards, estimators, losses.

It lives in the configuration room because such a name is part of a configuration, and because every room may use it.
Nothing of the user's is imported before `resolve_function` is called.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.config.suggest import nearest

_FILE_MODULE = "rlhf_file_"


class UnknownFunction(ValueError):
    """A name that leads to no function. The message says why and what is valid."""


def resolve_function(name: str, base_dir: str | Path | None = None) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names.

    Relative file names start at `base_dir` (default: the current folder). Raises `UnknownFunction` with the nearest
    name, or with the user's own error and its place when the module can't be imported.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UnknownFunction(f"{name!r} names no function: write `module:function` or `path/to/file.py:function`")
    module = _load_file(Path(base_dir or "."), place) if place.endswith(".py") else _load_module(place)
    function = getattr(module, attribute, None)
    if function is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownFunction(f"{place} has no function {attribute!r}{did_you_mean(attribute, own)}")
    if not callable(function):
        raise UnknownFunction(f"{attribute!r} in {place} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # mypy narrows Any to a callable that returns `object`


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises, SystemExit included
        raise UnknownFunction(f"importing module {name!r} failed: {describe(error)}") from error


def _load_file(base_dir: Path, place: str) -> ModuleType:
    path = (base_dir / place).resolve()
    if not path.is_file():
        raise UnknownFunction(f"there is no file {path}; relative names start at {base_dir.resolve()}")
    # One name for each file, so that two files with the same name don't replace each other.
    name = f"{_FILE_MODULE}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # always there for a name that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # as above
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UnknownFunction(f"importing {path} failed: {describe(error)}") from error
    return module


def describe(error: BaseException) -> str:
    """An error of the user's code with the place in their file where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{type(error).__name__}: {error}" + (f" ({own[-1].filename}, line {own[-1].lineno})" if own else "")


def did_you_mean(value: object, known: Iterable[object]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is near."""
    found = nearest(str(value), [str(one) for one in known], cutoff=0.5)
    return f" (did you mean {found!r}?)" if found else ""


def dump_function(function: Callable[..., Any]) -> bytes:
    """The function as it travels to another process: by value where that process can't import it."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__.startswith(_FILE_MODULE)
    if module is not None and by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        dumped: bytes = cloudpickle.dumps(function)
    finally:
        if module is not None and by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return dumped
