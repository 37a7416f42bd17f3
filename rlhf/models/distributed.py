"""Models spread over processes: the ranks' process group, and ZeRO-3 inference."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rlhf.cluster.ports import join_store, serve_store

# Elements that stage 3 has whole on every rank beside the module that is computed: gathered ahead of their use, or kept
# for a use that is near. By DeepSpeed's defaults a model of up to 1e9 stays whole once it was gathered.
AHEAD_ELEMENTS, KEPT_ELEMENTS = 50_000_000, 50_000_000
# What stage 3 gathers, and when it lets go of it. Parameters of fewer than 10,000 elements are never sharded: norms and
# biases, and no matrix.
GATHERING = {
    "stage3_param_persistence_threshold": 10_000,
    "stage3_prefetch_bucket_size": AHEAD_ELEMENTS,
    "stage3_max_reuse_distance": KEPT_ELEMENTS,
}


def set_up_compute(device: Literal["cpu", "cuda"], deterministic: bool, threads: int) -> None:
    """Give this process its threads, where it computes on a CPU, and torch's deterministic algorithms if wanted."""
    if device == "cpu":
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def seed_random_streams(*key: str | int) -> None:
    """Set this process's random streams (Python's, numpy's, torch's on every device) to a function of `key` alone.

    Nothing of ours draws from them. A model that does, by dropout for one, then does so alike in a repeated run.
    """
    text = "/".join(map(str, key))
    # 32 bits, the most that numpy takes.
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def join_process_group(
    rank: int, world_size: int, master: tuple[str, int], device: Literal["cpu", "cuda"], deadline_s: float
) -> None:
    """Join the ranks' process group, gloo or NCCL, whose every operation has the deadline; once a process.

    torch.distributed comes first and DeepSpeed adopts it: DeepSpeed's own call binds the group to a device, which
    makes a second NCCL group hang.
    """
    os.environ["DS_ACCELERATOR"] = device
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", 0)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that torch has deprecated; nothing a user could do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if device == "cpu":
        # DeepSpeed asks this table which of its C++ operators can be built and would spend a minute of g++ on a
        # shared-memory all-reduce. None of them is needed here, so the answer is none.
        deepspeed.ops.__compatible_ops__ = {}
    timeout = timedelta(seconds=deadline_s)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=serve_store(master[1], timeout) if rank == 0 else join_store(*master, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)


def register_borrowed(model: nn.Module) -> None:
    """Tell ZeRO stage 3 which modules use parameters of others, so that those are whole in their forward passes.

    A module lists them in its `borrowed`. The model's parameters have to be partitioned already.
    """
    import deepspeed

    for module in model.modules():
        for parameter in getattr(module, "borrowed", ()):
            deepspeed.zero.register_external_parameter(module, parameter)


def shard_for_inference(load: Callable[[], nn.Module], dtype: str) -> Any:
    """Load a model sharded over the ranks of this process group, to go forward only; the result is called as a module.

    `load` is called once and returns the model. A rank keeps its share of the weights and gathers those of a layer
    while it is computed (ZeRO stage 3). Loading and every call are collective: all ranks make equally many calls, each
    with a batch of its own. The ranks have to be in `join_process_group` first.
    """
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        # A required key without an effect here.
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": 3, **GATHERING},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    # from_pretrained finds this object by itself and loads straight into shards; it has to live until that is done.
    partitioned = HfDeepSpeedConfig(settings)
    model = load()
    del partitioned
    register_borrowed(model)
    model.eval().requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    engine.eval()
    return engine
