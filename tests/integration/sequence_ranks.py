"""Learners whose ranks share rows, and one rank alone, in processes that `test_sequence_parallel.py` reads from.

This process imports the stack once and forks the ranks, since importing it takes longer than what they do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401
import torch
import transformers  # noqa: F401

from rlhf.cluster.ports import free_port
from rlhf.learners.critic import CriticLearner
from tests.integration.learner_ranks import Rank, make_config, make_samples, with_returns

# Ranks, and how many of them share each row.
RUNS = {"alone": (1, 1), "two that share": (2, 2), "two times two that share": (4, 2)}
STAGES = (1, 2, 3)
DEADLINE_S = 400


def check_policy(arguments: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Gradients, scores and two updates at a ZeRO stage."""
    rank = Rank(arguments, make_config(arguments.models / "untied", policy=arguments.settings(zero_stage=stage)))
    found: dict[str, Any] = {"drawn": float(torch.rand(()))}
    samples = make_samples()
    for layout, tokens in (("one row", 4096), ("several rows", 60)):
        rank.configure(policy={"max_tokens_per_microbatch": tokens})
        found[f"gradients, {layout}"] = rank.gradients(samples)
    found["gradients, one sample"] = rank.gradients(samples[:1])
    rank.learner.dry_run()
    found["gradients, after dry run"] = rank.gradients(samples)
    found["scores"] = rank.logprobs(samples)
    rank.configure(policy={"epochs": 2, "minibatches": 2}, algorithm={"entropy_coefficient": 0.1})
    found["metrics"] = [rank.learner.update(step, rank.with_old(make_samples(step))).metrics for step in (1, 2)]
    found["weights"] = rank.weights()
    return found


def check_bfloat16(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gradients of a model that exchanges bfloat16."""
    rank = Rank(arguments, make_config(arguments.models / "untied", "bfloat16", policy=arguments.settings()))
    return {"gradients": rank.gradients(make_samples())}


def check_adapters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Adapters and metrics after two updates, with layers computed again, and the reference's scores."""
    policy = arguments.settings(zero_stage=3, lora={"rank": 4}, activation_checkpointing=True)
    rank = Rank(arguments, make_config(arguments.models / "untied", policy=policy))
    metrics = [rank.learner.update(step, make_samples(step)).metrics for step in (1, 2)]
    scores = rank.learner.score_as_reference(make_samples())[1]
    return {"metrics": metrics, "adapters": rank.adapters(), "scores": scores}


def check_critic(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gradients, values and two updates of a critic that starts from a reward model with its head."""
    settings = arguments.settings(zero_stage=3, model=str(arguments.models / "reward"))
    config = make_config(arguments.models / "untied", algorithm={"advantage": "gae"}, critic=settings)
    rank = Rank(arguments, config, CriticLearner)
    samples, found = with_returns(make_samples()), dict[str, Any]()
    found["gradients"] = rank.gradients(samples)
    found["scores"] = rank.logprobs(samples)
    found["metrics"] = [rank.learner.update(step, samples).metrics for step in (1, 2)]
    return found


def member(run: str, rank: int, port: int, models: Path, out: Path) -> None:
    """One rank of a run; writes what it found."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    log = (out / f"log-{run}-{rank}.txt").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    world, sharing = RUNS[run]
    arguments = argparse.Namespace(rank=rank, world=world, port=port, models=models)
    arguments.settings = lambda **more: {"ranks": world, "sequence_parallel": sharing, **more}
    found: dict[str, Any] = {f"policy {stage}": check_policy(arguments, stage) for stage in STAGES}
    found["bfloat16"] = check_bfloat16(arguments)
    found["adapters"] = check_adapters(arguments)
    found["critic"] = check_critic(arguments)
    torch.save(found, out / f"found-{run}-{rank}.pt")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    ranks = []
    for run, (world, _) in RUNS.items():
        port = free_port()
        for rank in range(world):
            place = (run, rank, port, arguments.models, arguments.out)
            ranks.append(fork.Process(target=member, args=place, name=f"{run}-{rank}", daemon=True))
    for process in ranks:
        process.start()
    end = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    failed = [process.name for process in ranks if process.exitcode != 0]
    for name in failed:
        print(f"{name}:\n{(arguments.out / f'log-{name}.txt').read_text()[-4000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
