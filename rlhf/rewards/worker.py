"""What runs inside a reward worker process: one function call at a time, on the main thread.

Invariants
- The process ends with its parent: it reads the end of the pipe, and the kernel kills it when the parent was killed.
- Functions run on the main thread, so that verifiers that limit themselves with signals work.
- `STARTED` is sent just before the function is called. What dies before it is the pool's failure and is tried again;
  what dies after it is the function's, unless a signal killed it, which is tried again once.
- Whatever the function raises or returns comes back as a `CallResult` of plain numbers and texts; nothing of the
  user's is pickled on the way back.

Imports are kept to the standard library and this room's own light modules, so that a worker starts fast.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from rlhf.rewards.builtin import IMPORTS
from rlhf.rewards.resolve import resolve
from rlhf.rewards.types import RewardInput, RewardResult

READY = "ready"
STARTED = "started"
_PR_SET_PDEATHSIG = 1
# Enough of a traceback to see the user's own frames, without flooding the run's log.
_TRACEBACK_LINES = 20


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One configured function on its way to a worker; `pickled` when it was handed in from Python."""

    key: str
    name: str
    options: Mapping[str, Any]
    base_dir: str
    pickled: bytes | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What a function said about one sample: a score, None (doesn't apply), or what is wrong with its answer."""

    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call: a value for each sample, or the error that failed all of them."""

    values: tuple[Value, ...] = ()
    error: str | None = None


def main(descriptor: int, parent_pid: int) -> None:
    """Serve calls from the pipe `descriptor` until it is closed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent was gone before the line above took effect
        return
    os.set_inheritable(descriptor, False)  # programs that a function starts must not keep the pipe open
    pipe = Connection(descriptor)
    functions: list[Callable[[Sequence[RewardInput]], Any]] = []
    for spec in pipe.recv():
        try:
            functions.append(_load(spec))
        except Exception:
            pipe.send(f"reward function {spec.key!r} can't be loaded:\n{_tail(traceback.format_exc())}")
            return
    pipe.send(READY)
    while True:
        try:
            index, samples = pipe.recv()
        except EOFError:
            return
        pipe.send(STARTED)
        pipe.send(call(functions[index], samples))


def _load(spec: FunctionSpec) -> Callable[[Sequence[RewardInput]], Any]:
    if spec.pickled is not None:
        return functools.partial(pickle.loads(spec.pickled), **spec.options)
    if spec.name in IMPORTS:
        importlib.import_module(IMPORTS[spec.name])
    function = resolve(spec.name, spec.base_dir)
    return functools.partial(function, **spec.options)


def call(function: Callable[[Sequence[RewardInput]], Any], samples: Sequence[RewardInput]) -> CallResult:
    """Call the function and check what it returns: one value for each sample, each a finite number or None."""
    try:
        returned = function(samples)
    except BaseException as error:  # sys.exit() in a function is a failed reward too
        # The first frame is this one; the user's follow.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        return CallResult(error="raised\n" + _tail("".join(traceback.format_exception(type(error), error, trace))))
    expected = f"it must return one score for each of the {len(samples)} samples"
    if isinstance(returned, str | bytes | Mapping):
        return CallResult(error=f"returned a {type(returned).__name__}: {expected}")
    try:
        answers = list(returned)
    except Exception as error:
        return CallResult(error=f"returned a {type(returned).__name__} ({error}): {expected}")
    if len(answers) != len(samples):
        return CallResult(error=f"returned {len(answers)} scores: {expected}")
    return CallResult(values=tuple(_value(answer) for answer in answers))


def _value(answer: object) -> Value:
    try:
        if answer is None:
            return Value()
        if not isinstance(answer, RewardResult):
            return Value(score=_number(answer, "score"))
        score = None if answer.score is None else _number(answer.score, "score")
        metrics = {str(key): _number(value, f"metric {key!r}") for key, value in answer.metrics.items()}
        return Value(score=score, metrics=metrics)
    except Exception as error:  # numbers and mappings of the user's own types may raise anything
        return Value(error=str(error))


def _number(value: object, what: str) -> float:
    # Scalars of numpy and torch convert themselves; text doesn't, though float("1") would work.
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"returned the {what} {value!r}: it must be a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned the {what} {number}: it must be finite, or None where the function doesn't apply")
    return number


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])
