"""Rules about low-rank adapters, and whether the model has the layers that they are for."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlhf.config.checkpoints import matrix_names
from rlhf.config.problems import Problem
from rlhf.config.rules_common import Rule, problem
from rlhf.config.schema import Config
from rlhf.config.suggest import nearest

# The last parts of their names in transformers.
_ENDS_OF_THE_MODEL = ("lm_head", "embed_tokens")


def adapters_are_for_layers(config: Config) -> Iterator[Problem]:
    """`policy.lora.target_modules` names no output head and no embedding, which may be one tensor."""
    for index, name in _named_targets(config):
        if name in _ENDS_OF_THE_MODEL:
            yield problem(
                config,
                f"policy.lora.target_modules.{index}",
                "adapters are for the layers between embedding and output head",
                "Leave it out, or use all-linear",
            )


def adapters_start_from_the_model(config: Config) -> Iterator[Problem]:
    """`policy.lora` doesn't go with `checkpoint.init_from`: the frozen weights are those of `model.path`."""
    if config.policy.lora is not None and config.checkpoint.init_from is not None:
        yield Problem(
            "checkpoint.init_from",
            "with policy.lora the frozen weights are those of model.path, which is also the reference",
            str(config.checkpoint.init_from),
            "Leave it out, and give the export of that run as model.path",
        )


def adapters_find_their_layers(config: Config) -> Iterator[Problem]:
    """Each name in `policy.lora.target_modules` is a layer of the model, as far as its files tell."""
    found = matrix_names(os.path.expanduser(config.model.path)) if config.policy.lora is not None else None
    if found is None:
        return
    layers = sorted({name.rpartition(".")[2] for name in found} - set(_ENDS_OF_THE_MODEL))
    for index, name in _named_targets(config):
        if name not in layers and name not in _ENDS_OF_THE_MODEL:
            near = nearest(name, layers)
            yield problem(
                config,
                f"policy.lora.target_modules.{index}",
                f"{config.model.path} has no layer of this name",
                f"Did you mean {near}?" if near else f"It has: {', '.join(layers)}",
            )


def _named_targets(config: Config) -> Iterator[tuple[int, str]]:
    lora = config.policy.lora
    if lora is not None and not isinstance(lora.target_modules, str):
        yield from enumerate(lora.target_modules)


LORA_RULES: tuple[Rule, ...] = (adapters_are_for_layers, adapters_start_from_the_model)
