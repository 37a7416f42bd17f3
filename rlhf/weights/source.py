"""The weights a learner sends: gathered layer by layer, cast to the wire dtype, in checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups


class WeightHolder(Protocol):
    """What a learner offers to be a weight source."""

    def named_parameters_for_sync(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters under their checkpoint names, a tied output head included."""
        ...

    def gather(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank (a collective at ZeRO stage 3)."""
        ...


class LearnerSource(WeightSource):
    """`WeightSource` over a ZeRO engine. Ranks iterate it together: gathering a layer is a collective at stage 3.

    A yielded tensor is valid until the next one is asked for. Tied models send their output head as well, although it
    is the embedding's tensor: on CPU the engine keeps the head in a packed copy of its own, which would stay old.
    """

    def __init__(self, holder: WeightHolder, wire_dtype: torch.dtype) -> None:
        self._holder = holder
        self._wire_dtype = wire_dtype
        parameters = dict(holder.named_parameters_for_sync())
        self._groups = [[(name, parameters[name]) for name in names] for names in layerwise_groups(list(parameters))]

    def metadata(self) -> list[ParamMeta]:
        """Names, wire dtype and full shapes, in the order of iteration, without gathering anything."""
        return [
            # At stage 3 a parameter's own shape is that of its shard; DeepSpeed keeps the full one beside it.
            ParamMeta(name, self._wire_dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for group in self._groups
            for name, parameter in group
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups:
            with self._holder.gather([parameter for _, parameter in group]):
                for name, parameter in group:
                    yield name, parameter.detach().to(self._wire_dtype)
