"""One rank of learners that save memory or communication: the process behind `test_learner_memory.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.learners.update import Turn
from rlhf.weights.source import LearnerSource
from tests.integration.learner_ranks import (
    BUCKET_BYTES,
    Rank,
    leave,
    make_config,
    make_sample,
    make_samples,
    parse,
    with_advantage,
)


def check_recomputation(arguments: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Gradients with activation checkpointing, and what a rank holds of the weights after them."""
    settings = {"zero_stage": stage, "activation_checkpointing": True}
    rank = Rank(arguments, make_config(Path(arguments.models) / "untied", policy=settings))
    found: dict[str, Any] = {}
    for layout, tokens in (("1x8", 4096), ("8x1", 1)):
        rank.configure(policy={"max_tokens_per_microbatch": tokens})
        # A pass without gradients before, as for old log-probs.
        rank.logprobs(make_samples())
        found[f"gradients {layout}"] = rank.gradients(make_samples())
    matrices = [p for p in rank.learner._zero.model.parameters() if p.dim() == 2]
    found["in effect"] = rank.learner._zero.model.lm.is_gradient_checkpointing
    found["whole matrices"] = sum(parameter.numel() > 0 for parameter in matrices)
    return found


def check_collectives(arguments: argparse.Namespace, stage: int, dtype: str) -> dict[int, int]:
    """Collective calls of one optimizer step, by its number of micro-batches on a rank."""
    rank = Rank(arguments, make_config(Path(arguments.models) / "untied", dtype, policy={"zero_stage": stage}))
    # Four groups for each rank, of one sample with six tokens.
    samples = [make_sample(4 * group, [5, 76, 5], [84, 7, 2], 1.0) for group in range(4 * arguments.world)]
    # DeepSpeed meets a few times more in the first step.
    rank.learner.update(1, samples)
    found = {}
    for micro_batches in (1, 4):
        rank.configure(policy={"max_tokens_per_microbatch": 4 * 6 // micro_batches})
        update = rank.learner._update
        shard = update.shard(samples, 1)
        (minibatch,) = shard.layout.minibatches
        assert [len(share) for share in minibatch.ranks] == [micro_batches] * arguments.world
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            update.accumulate(minibatch, shard, update.meter(shard), Turn())
            update._apply(minibatch, 1e-3)
        found[micro_batches] = sum(event.name.startswith("c10d::") for event in profiler.events())
    return found


def check_offload(arguments: argparse.Namespace, offload: str, dtype: str, to: str = "host") -> dict[str, Any]:
    """Gradients with what lies in the host's memory, failures that may move no weight, and three updates."""
    found: dict[str, Any] = {}
    settings = {"zero_stage": 3, "offload": offload, "offload_to": to}
    rank = Rank(arguments, make_config(Path(arguments.models) / "untied", dtype, policy=settings))
    samples, start = make_samples(), rank.weights()
    for layout, tokens in (("1x8", 4096), ("8x1", 1)):
        rank.configure(policy={"max_tokens_per_microbatch": tokens})
        found[f"gradients {layout}"] = rank.gradients(samples)
    found["NaN advantage"] = rank.failure([*samples[:2], with_advantage(samples[2], float("nan")), *samples[3:]])
    found["gradient overflows"] = rank.failure([with_advantage(s, 3e38) for s in samples])
    unmoved = rank.weights()
    found["unmoved"] = all(torch.equal(start[name], unmoved[name]) for name in start)
    rank.configure()
    for step in (1, 2, 3):
        rank.learner.update(step, make_samples(step))
    found["weights"] = rank.weights()
    optimizer = rank.learner.engine.optimizer
    found["in effect"] = (optimizer.offload_optimizer, optimizer.offload_param)
    found["sent"] = {name: tensor.clone() for name, tensor in LearnerSource(rank.learner, torch.float32, BUCKET_BYTES)}
    if to == "disk":
        found["on disk"] = sum(file.stat().st_size for file in rank.learner._disk.rglob("*.swp"))
    return found


def check_adapters(arguments: argparse.Namespace, **policy: Any) -> dict[str, Any]:
    """Three updates of adapters with these settings; what is trained and what engines are sent after them."""
    model = Path(arguments.models) / "untied"
    rank = Rank(arguments, make_config(model, policy={"lora": {"rank": 4}, "max_tokens_per_microbatch": 60, **policy}))
    samples = make_samples()
    reference = rank.learner.score_as_reference(samples)[1]
    for step in (1, 2, 3):
        rank.learner.update(step, make_samples(step))
    again = rank.learner.score_as_reference(samples)[1]
    same = all(np.array_equal(again[name], values, equal_nan=True) for name, values in reference.items())
    sent = {name: tensor.clone() for name, tensor in LearnerSource(rank.learner, torch.float32, BUCKET_BYTES)}
    return {"adapters": rank.adapters(), "sent": sent, "reference is the same": same}


def main() -> None:
    arguments = parse()
    found: dict[str, Any] = {}
    for stage, dtype in ((1, "float32"), (1, "bfloat16"), (2, "float32")):
        found[f"collectives {stage} {dtype}"] = check_collectives(arguments, stage, dtype)
    for stage in (1, 2, 3):
        found[f"recomputation {stage}"] = check_recomputation(arguments, stage)
    for offload in ("none", "optimizer", "optimizer_and_parameters"):
        for dtype in ("float32", "bfloat16"):
            found[f"offload {offload} {dtype}"] = check_offload(arguments, offload, dtype)
    found["adapters"] = check_adapters(arguments, zero_stage=1)
    for stage in (1, 2, 3):
        found[f"adapters recomputation {stage}"] = check_adapters(
            arguments, zero_stage=stage, activation_checkpointing=True
        )
    for offload in ("optimizer", "optimizer_and_parameters"):
        found[f"adapters {offload}"] = check_adapters(
            arguments, zero_stage=3, offload=offload, activation_checkpointing=True
        )
    leave(found, arguments)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
