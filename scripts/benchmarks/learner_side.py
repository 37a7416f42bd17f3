"""One side of `learner.py` on one workload, in a process of its own: a rank of a policy learner, or the bare loop.

`learner.py` starts it, with the job as a JSON object. Prints what it measured as a JSON object in the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from common import log_normal

from rlhf.batching import LearnerSample
from rlhf.batching.plan import unique_tokens
from rlhf.cluster.model_shape import ModelShape
from rlhf.config.schema import Config
from rlhf.trajectories import Columns

Workload = Literal["groups", "alone"]
Lengths = Literal["constant", "log-normal"]
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Job:
    """One side on one workload: `layout` of the bare loop, or the learner's ZeRO stage and ranks."""

    model: str
    dtype: str
    workload: Workload
    lengths: Lengths
    layout: str | None
    stage: int
    ranks: int
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    sigma: float
    max_tokens: int
    updates: int
    seed: int

    @property
    def side(self) -> str:
        """Its name in the tables."""
        return f"bare, {self.layout}" if self.layout else f"ZeRO {self.stage}, {self.ranks} rank{'s'[: self.ranks - 1]}"


def response_lengths(job: Job) -> list[int]:
    """Response tokens of each sample, with the mean that was asked for."""
    count = job.prompts * job.samples
    if job.lengths == "constant":
        return [job.response_tokens] * count
    drawn = log_normal(job.response_tokens, job.sigma, count, job.seed)
    return [int(tokens) for tokens in drawn.clip(1)]


def make_samples(job: Job, vocabulary: int) -> list[LearnerSample]:
    """Random tokens in the job's lengths, with an advantage for each sample; the same for all sides."""
    generator = np.random.default_rng(job.seed)
    group = job.samples if job.workload == "groups" else 1
    samples, prompt = list[LearnerSample](), list[int]()
    for index, tokens in enumerate(response_lengths(job)):
        if index % group == 0:
            prompt = generator.integers(vocabulary, size=job.prompt_tokens).tolist()
        response = generator.integers(vocabulary, size=tokens).tolist()
        columns = Columns.from_completion(tuple(prompt), response, [-1.0] * tokens, 0)
        sample = LearnerSample(f"{index}", index // group, len(prompt) + tokens, len(prompt), columns)
        advantages = np.full(sample.total_tokens, generator.normal(), np.float32)
        samples.append(sample.with_scores(advantages={sample.sample_id: advantages}))
    return samples


def learner_config(job: Job) -> Config:
    """A run of this model, of which only the policy is started."""
    longest = max(response_lengths(job))
    policy = {
        "ranks": job.ranks,
        "zero_stage": job.stage,
        "learning_rate": LEARNING_RATE,
        "max_tokens_per_microbatch": job.max_tokens,
    }
    rollout = {"max_new_tokens": longest, "samples_per_prompt": job.samples, "prompts_per_step": job.prompts}
    return Config.model_validate(
        {
            "model": {"path": job.model, "dtype": job.dtype},
            "data": {
                "prompts": {"source": "jsonl", "path": "unused.jsonl"},
                "max_prompt_tokens": job.prompt_tokens,
            },
            "rollout": rollout,
            "reward": {"functions": [{"name": "length"}]},
            # The samples' engine log-probs are made up.
            "algorithm": {"correction": {"method": "none"}},
            "policy": policy,
        }
    )


def run_learner(job: Job, samples: list[LearnerSample], rank: int, port: int) -> dict[str, Any]:
    """One rank of the learner: a warm-up and the timed updates."""
    import torch

    from rlhf.learners.policy import PolicyLearner

    learner = PolicyLearner(learner_config(job), rank, job.ranks, "cpu")
    padded = learner.setup(("127.0.0.1", port))
    if padded is not None:
        raise RuntimeError(f"the learner pads rows of this model: {padded}")
    first = learner.update(1, samples).metrics
    passes, seconds, reported = [], [], []
    for step in range(2, 2 + job.updates):
        started = time.perf_counter()
        result = learner.update(step, samples)
        seconds.append(time.perf_counter() - started)
        passes.append(sum(s.seconds for s in result.spans if s.name == "policy/forward_backward"))
        reported.append(result.metrics)
    useful = unique_tokens(sample.length for sample in samples)
    found = {
        "passes": passes,
        "seconds": seconds,
        "grad_norm": first["policy/grad_norm"],
        "operations": learner._zero.operations.total(sample.length for sample in samples),
        "matrix_rate": learner._zero.matrix_rate,
        # Seconds of the same updates by the learner's own metrics.
        "reported_seconds": [useful / metrics["policy/useful_tokens_per_second"] for metrics in reported],
        "attention": learner.module.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "reported": {
            name: statistics.median(metrics[f"policy/{name}"] for metrics in reported)
            for name in ("useful_tokens_per_second", "padding_fraction", "duplicate_fraction", "mfu")
        },
    }
    learner.close()
    return found


def run_bare(job: Job, samples: list[LearnerSample]) -> dict[str, Any]:
    """The bare loop: a warm-up and the timed updates."""
    import torch
    from bare_loop import BareLoop

    from rlhf.learners.rate import matrix_rate
    from rlhf.models.load import DTYPES
    from rlhf.models.operations import Operations

    loop = BareLoop(Path(job.model), job.dtype, job.layout, job.max_tokens, LEARNING_RATE)  # type: ignore[arg-type]
    first = loop.update(samples)
    timed = [loop.update(samples) for _ in range(job.updates)]
    operations, lengths = Operations.of(SimpleNamespace(lm=loop.model)), [sample.length for sample in samples]
    own_prompts = [replace(length, group_id=index) for index, length in enumerate(lengths)]
    return {
        "passes": [update.passes for update in timed],
        "seconds": [update.seconds for update in timed],
        "grad_norm": first.grad_norm,
        "operations": operations.total(lengths),
        "operations_own_prompts": operations.total(own_prompts),
        "matrix_rate": matrix_rate(torch.device("cpu"), DTYPES[job.dtype]),
        "attention": loop.attention,
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    """Run the job that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=json.loads)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    job = Job(**arguments.job)
    samples = make_samples(job, ModelShape.from_path(job.model).vocab)
    found = run_bare(job, samples) if job.layout else run_learner(job, samples, arguments.rank, arguments.port)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
