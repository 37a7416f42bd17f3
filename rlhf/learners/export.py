"""Write the policy as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf.learners.ranks import Ranks
from rlhf.models.load import DTYPES

if TYPE_CHECKING:
    from rlhf.learners.policy import PolicyLearner

# What belongs to the tokenizer and to generation is copied byte for byte: saving it again would bring the defaults of
# the installed library in, and another chat template than was trained with.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
COPIED_FOLDERS = ("additional_chat_templates",)


def export(policy: PolicyLearner, ranks: Ranks, source: str, dtype: str, target: Path) -> None:
    """Write weights, configuration, tokenizer and generation settings to the folder `target`; rank 0 writes.

    Weights are in `dtype`, in safetensors. Everything else comes from the checkpoint at `source`. The folder is
    written aside and renamed, so it is complete or absent; one that exists is replaced. Collective.
    """
    state = _gather_state(policy, ranks.rank == 0, DTYPES[dtype])
    with ranks.together(f"export to {target}"):
        if ranks.rank == 0:
            _write(policy, state, source, dtype, target)


def _gather_state(policy: PolicyLearner, keep: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights in CPU memory where `keep`; one layer at a time is whole on the other ranks."""
    state: dict[str, torch.Tensor] = {}
    for _, layer in itertools.groupby(policy.named_parameters(), key=lambda item: _layer(item[0])):
        members = list(layer)
        with policy.gather([parameter for _, parameter in members]):
            if keep:
                # copy=True: what was gathered is gone after the block, and at the other stages it goes on training.
                state.update((name, policy.weight(p).to("cpu", dtype, copy=True)) for name, p in members)
    return state


def _layer(name: str) -> str:
    """The part of a name up to the first number: `model.layers.3`."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _write(policy: PolicyLearner, state: dict[str, torch.Tensor], source: str, dtype: str, target: Path) -> None:
    from transformers import AutoConfig

    aside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    policy.module.save_pretrained(aside, state_dict=state)
    # The model's own configuration has dropout and cache off for training; the checkpoint's is what users expect.
    config = AutoConfig.from_pretrained(source)
    config.dtype = DTYPES[dtype]
    config.save_pretrained(aside)
    _copy_companions(_folder(source), aside)
    if target.exists():
        shutil.rmtree(target)
    os.replace(aside, target)


def _folder(source: str) -> Path:
    """The local folder of a checkpoint, also when it is named by its hub name."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    return Path(str(cached_file(source, "config.json"))).parent


def _copy_companions(source: Path, target: Path) -> None:
    for item in source.iterdir():
        if item.is_file() and any(fnmatch(item.name, pattern) for pattern in COPIED):
            shutil.copyfile(item, target / item.name)
        elif item.is_dir() and item.name in COPIED_FOLDERS:
            shutil.copytree(item, target / item.name)
