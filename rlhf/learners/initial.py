"""Start from the weights of another run's checkpoint, and from nothing else of it (`checkpoint.init_from`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from rlhf.learners.checkpoint import SHARDS


def load_initial_weights(module: nn.Module, folder: Path, zero_stage: int) -> None:
    """Copy the weights of a learner's checkpoint into `module`, which is loaded and not yet under DeepSpeed.

    `folder` is the learner's part of a checkpoint that was verified: DeepSpeed's own tool reads the float32 masters of
    all ranks from it, whatever their number and stage were, so each rank needs room for all of them once. They are
    rounded to the module's dtype, as when a model is loaded that was exported. Raises `ValueError` when there is no
    such part, and when names or shapes are those of another model.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if not folder.is_dir():
        raise ValueError(f"checkpoint.init_from has no {folder.name} ({folder}): that run had none")
    saved = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=SHARDS)
    parameters = dict(module.named_parameters())
    wrong = _differences(module, parameters, saved)
    if wrong:
        raise ValueError(
            f"{folder} is the checkpoint of another model: {len(wrong)} names differ in being there, in shape, or in "
            f"sharing a tensor ({', '.join(wrong[:3])})"
        )
    for name, parameter in parameters.items():
        with _whole(parameter, zero_stage), torch.no_grad():
            if parameter.numel():
                parameter.copy_(saved[name])


def _differences(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names that speak against `saved` being of a model like `module`."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    wrong = {name for name, shape in shapes.items() if name not in saved or tuple(saved[name].shape) != shape}
    # What this model has no place for, such as a bias, would be left out in silence.
    wrong |= saved.keys() - module.state_dict().keys()
    # A head of its own can't become one that is tied to the embedding.
    first = {id(parameter): name for name, parameter in parameters.items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        if {name, owner} <= saved.keys() and not torch.equal(saved[name], saved[owner]):
            wrong.add(name)
    return sorted(wrong)


def _whole(parameter: nn.Parameter, zero_stage: int) -> AbstractContextManager[None]:
    """Within the block the parameter is whole and may be written: on rank 0, from where it is spread, at stage 3."""
    if zero_stage != 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)  # type: ignore[no-any-return]
