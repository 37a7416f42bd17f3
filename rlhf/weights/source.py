"""The weights a learner sends: gathered piece by piece, cast to the wire dtype, in checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups

from rlhf.weights.buckets import plan_buckets


class WeightHolder(Protocol):
    """What a learner offers to be a weight source."""

    def named_parameters_for_sync(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters under their checkpoint names, a tied output head included."""
        ...

    def gather(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank (a collective at ZeRO stage 3)."""
        ...

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What to send for a parameter, within `gather`: its tensor, or a new one that an adapter was merged into."""
        ...


class LearnerSource(WeightSource):
    """`WeightSource` over a ZeRO engine. Ranks iterate it together: gathering a piece is a collective at stage 3.

    A piece is at most `bucket_bytes` (of the parameters' own dtype) or a single larger tensor; adapters come on top. A
    yielded tensor is valid until the next one is asked for, and one that an adapter is merged into is made only then.
    Tied models send their output head as well, although it is the embedding's tensor: on CPU the engine keeps the head
    in a packed copy of its own, which would stay old.
    """

    def __init__(self, holder: WeightHolder, wire_dtype: torch.dtype, bucket_bytes: int) -> None:
        self._holder = holder
        self._wire_dtype = wire_dtype
        parameters = dict(holder.named_parameters_for_sync())
        order = [name for names in layerwise_groups(list(parameters)) for name in names]
        cut = plan_buckets([(name, parameters[name].dtype, _shape(parameters[name])) for name in order], bucket_bytes)
        self._pieces = [[(slot.name, parameters[slot.name]) for slot in bucket.slots] for bucket in cut]

    @property
    def gathers(self) -> bool:
        """Whether a piece takes memory of its own while it is whole."""
        return any(hasattr(parameter, "ds_shape") for piece in self._pieces for _, parameter in piece)

    def metadata(self) -> list[ParamMeta]:
        """Names, wire dtype and full shapes, in the order of iteration, without gathering anything."""
        return [
            ParamMeta(name, self._wire_dtype, _shape(parameter)) for piece in self._pieces for name, parameter in piece
        ]

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in their own dtype, merged ones in float32; who packs them casts on the way."""
        for piece in self._pieces:
            with self._gathered(piece):
                for name, parameter in piece:
                    yield name, self._holder.weight(parameter)

    def follow(self) -> None:
        """Take part in a pass of all ranks without a use for the tensors."""
        for piece in self._pieces:
            with self._gathered(piece):
                pass

    def _gathered(self, piece: Sequence[tuple[str, torch.nn.Parameter]]) -> AbstractContextManager[None]:
        unique = {id(parameter): parameter for _, parameter in piece}
        return self._holder.gather(list(unique.values()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.parameters():
            yield name, tensor.to(self._wire_dtype)


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    # At stage 3 a parameter's own shape is that of its shard; DeepSpeed keeps the full one beside it.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
