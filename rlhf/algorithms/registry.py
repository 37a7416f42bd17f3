"""Advantage estimators and policy losses of the user's own: by a registered name, or by `module:function`.

What a function asks of a run stands in `rlhf.config.catalogue`, where the configuration's rules read it; the functions
themselves are kept here. Nothing heavy is imported, so that a script may register before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from rlhf.config.catalogue import (
    ADVANTAGES,
    LOSSES,
    OWN_ADVANTAGES,
    OWN_LOSSES,
    AdvantageSpec,
    LossSpec,
    advantage_spec,
    loss_spec,
)
from rlhf.config.functions import UnknownFunction, describe, did_you_mean, dump_function, resolve_function

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
Spec = TypeVar("Spec", AdvantageSpec, LossSpec)


@dataclass(frozen=True)
class _Registry(Generic[Spec]):
    """The functions of one kind that were registered in this process, with their specs in the catalogue."""

    kind: str
    built_in: Mapping[str, Spec]
    specs: dict[str, Spec]
    # The facts about a function without a decorator.
    undecorated: Callable[[str], Spec]
    functions: dict[str, Function] = field(default_factory=dict)

    def add(self, spec: Spec, function: Function) -> None:
        if not spec.name or ":" in spec.name:
            raise ValueError(f"{self.kind} {spec.name!r}: a registered name has at least one character and no colon")
        if spec.name in self.built_in:
            raise ValueError(f"{self.kind} {spec.name!r} is built in: choose another name than {_list(self.built_in)}")
        known = self.functions.get(spec.name)
        if known is not None and _origin(known) != _origin(function):
            raise ValueError(
                f"{self.kind} {spec.name!r} is registered already, as {_place(known)}: "
                f"{_place(function)} needs another name"
            )
        self.specs[spec.name], self.functions[spec.name] = spec, function

    def find(self, name: str) -> Function:
        if name in self.functions:
            return self.functions[name]
        if ":" not in name:
            known = [*self.built_in, *self.functions]
            raise UnknownFunction(
                f"there is no {self.kind} {name!r}{did_you_mean(name, known)}; use one of {_list(known)}, "
                "`module:function` or `path/to/file.py:function`"
            )
        function = resolve_function(name)
        # Its own module may have registered it under a short name: the same facts hold for the long one.
        for short, registered in self.functions.items():
            if registered is function:
                self.specs[name] = replace(self.specs[short], name=name)
        self.specs.setdefault(name, self.undecorated(name))
        return function


_ADVANTAGES = _Registry("advantage estimator", ADVANTAGES, OWN_ADVANTAGES, advantage_spec)
_LOSSES = _Registry("policy loss", LOSSES, OWN_LOSSES, loss_spec)


def register_advantage(
    name: str,
    *,
    min_group_size: int = 1,
    level: Literal["sequence", "token"] = "sequence",
    needs_critic: bool = False,
    needs_greedy: bool = False,
) -> Callable[[F], F]:
    """Make a function an advantage estimator that `algorithm.advantage` can name.

    It is called as `f(batch: AdvantageBatch, config: AlgorithmConfig)` once a step, in one process, and returns a
    tensor with one entry for each sample [S] or, with `level="token"`, for each response token [N], or an `Advantages`
    with returns for the critic. The other arguments are those of `AdvantageSpec`. Raises `ValueError` for a name that
    is built in, or under which another function is registered.
    """
    if min_group_size < 1:
        raise ValueError(
            f"advantage estimator {name!r}: min_group_size {min_group_size}: a group has at least 1 sample"
        )
    if level not in ("sequence", "token"):
        raise ValueError(f"advantage estimator {name!r}: level {level!r}: use 'sequence' or 'token'")
    spec = AdvantageSpec(name, min_group_size, level, needs_critic, needs_greedy)

    def register(function: F) -> F:
        _ADVANTAGES.add(spec, function)
        return function

    return register


def register_policy_loss(name: str, *, uses_ratio: bool = True) -> Callable[[F], F]:
    """Make a function a policy loss that `algorithm.loss` can name.

    `uses_ratio` says whether it reads old log-probs. Raises `ValueError` as `register_advantage` does.
    """

    def register(function: F) -> F:
        _LOSSES.add(LossSpec(name, uses_ratio), function)
        return function

    return register


def own_advantage(name: str) -> Function | None:
    """The estimator that was registered under this name in this process, or None."""
    return _ADVANTAGES.functions.get(name)


def own_policy_loss(name: str) -> Function | None:
    """The policy loss that was registered under this name in this process, or None."""
    return _LOSSES.functions.get(name)


def find_advantage(name: str) -> Function:
    """The user's estimator of this name, registered or `module:function`; its spec is in the catalogue afterwards.

    Raises `UnknownFunction` when there is none.
    """
    return _ADVANTAGES.find(name)


def find_policy_loss(name: str) -> Function:
    """The user's policy loss of this name, registered or `module:function`; raises as `find_advantage`."""
    return _LOSSES.find(name)


def _origin(function: Function) -> object:
    """What tells two functions apart; a file that is imported twice defines the same one twice."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_firstlineno, code.co_name) if code is not None else id(function)


def _place(function: Function) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _list(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(names)


class OwnFunctionError(ValueError):
    """A function of the user's own that can't be found, or can't travel to the learner."""


def find_own(advantage: str, loss: str) -> dict[str, tuple[AdvantageSpec | LossSpec, Function]]:
    """The estimator (`advantage`) and the policy loss (`loss`) that are not built in, with their specs.

    Imports the user's modules; afterwards the catalogue knows what the functions ask for. Raises `OwnFunctionError`.
    """
    found: dict[str, tuple[AdvantageSpec | LossSpec, Function]] = {}
    for key, name, registry in (("advantage", advantage, _ADVANTAGES), ("loss", loss, _LOSSES)):
        if name in registry.built_in:
            continue
        try:
            function = registry.find(name)
        except UnknownFunction as error:
            raise OwnFunctionError(f"algorithm.{key}: {error}") from error
        found[key] = registry.specs[name], function
    return found


def dump_own(advantage: str, loss: str) -> dict[str, bytes]:
    """What `find_own` finds, as it travels to the learner. Raises `OwnFunctionError` with the name and the remedy."""
    import cloudpickle

    dumped = {}
    for key, (spec, function) in find_own(advantage, loss).items():
        try:
            dumped[key] = cloudpickle.dumps((spec, dump_function(function)))
        except Exception as error:  # pickling runs the __reduce__ of whatever the function refers to
            raise OwnFunctionError(
                f"algorithm.{key}: {spec.name!r} can't be sent to the learner: {describe(error)}; make it a function "
                "of a module, and open files and connections inside it"
            ) from error
    return dumped


def load_own(dumped: bytes) -> Function:
    """The function that `dump_own` packed; its spec is in this process's catalogue afterwards."""
    import cloudpickle

    spec, packed = cloudpickle.loads(dumped)
    if isinstance(spec, AdvantageSpec):
        OWN_ADVANTAGES[spec.name] = spec
    elif isinstance(spec, LossSpec):
        OWN_LOSSES[spec.name] = spec
    function: Function = cloudpickle.loads(packed)
    return function
