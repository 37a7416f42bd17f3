"""Low-rank adapters: a layer computes with W + (alpha / rank) B A, of which W is frozen and A and B are trained.

LoRA, Hu et al., arXiv:2106.09685, equation 3; the layers are peft's.

Invariants (each has a test)
- Base weights are never written: they want no gradient, and what is merged is merged into a copy.
- Fresh adapters change nothing, since B is 0. A follows from the seed alone: it is the same on every rank and at every
  start.
- With its adapters off a model computes what it computes without them, bit for bit.
- The checkpoint's names and shapes are those of the model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.schema import LoraConfig

# peft's name for an adapter where there is only one.
_NAME = "default"


def add_adapters(lm: Any, settings: LoraConfig, seed: int) -> None:
    """Freeze the weights of a transformers model and put a fresh adapter beside each targeted layer, in place.

    Under ZeRO stage 3 the weights may be partitioned already. Raises `ValueError` for a target that the model doesn't
    have, or that is no linear layer of its backbone.
    """
    import peft

    targets = settings.target_modules
    made = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    head = lm.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(made, lm, _NAME)
    for name, layer in _adapted(lm):
        base = layer.get_base_layer()
        # The loss reads the head's weight itself and would pass an adapter by.
        if base is head or type(base) is not nn.Linear:
            what = "the output head" if base is head else type(base).__name__
            raise ValueError(f"policy.lora.target_modules: {name} is {what}; adapters are for linear layers below it")


def checkpoint_parameters(lm: nn.Module, *, tied: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the model's checkpoint has, under their names in it; `tied` lists a shared one repeatedly.

    Adapters are not among them. For a model without any these are its `named_parameters`.
    """
    return [
        (name.replace(".base_layer.", "."), parameter)
        for name, parameter in lm.named_parameters(remove_duplicate=not tied)
        if ".lora_" not in name
    ]


class Adapters:
    """The adapters of a model, which may have none, and what they make of its weights."""

    def __init__(self, lm: nn.Module) -> None:
        self._layers = {id(layer.get_base_layer().weight): layer for _, layer in _adapted(lm)}

    def beside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters, and those of their adapters: all that `merged` reads."""
        layers = [self._layers[id(p)] for p in parameters if id(p) in self._layers]
        return [*parameters, *(matrix for layer in layers for matrix in _matrices(layer))]

    def merged(self, parameter: nn.Parameter) -> Tensor:
        """W + (alpha / rank) B A in float32 and memory of its own; of a parameter without an adapter itself.

        All matrices have to be whole.
        """
        layer = self._layers.get(id(parameter))
        if layer is None:
            return parameter.detach()
        with torch.no_grad():
            down, up = (matrix.float() for matrix in _matrices(layer))
            copy = parameter.detach().to(torch.float32, copy=True)
            return copy.addmm_(up, down, alpha=layer.scaling[_NAME])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model computes without its adapters."""
        # peft's own switch also turns the adapters' gradients off and on, which DeepSpeed has hooks on.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False


def _adapted(lm: nn.Module) -> list[tuple[str, Any]]:
    """peft's layers by name; told by what they have, so that a model without any needs no peft."""
    return [(name, module) for name, module in lm.named_modules() if hasattr(module, "lora_A")]


def _matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank, in] and B [out, rank]."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
