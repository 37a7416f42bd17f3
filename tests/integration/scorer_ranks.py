"""One rank of sharded scorers in a process of its own; `test_scorers_sharded.py` reads what it found.

All checks share the process because starting it (torch, DeepSpeed, the process group) costs more than they do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.batching import LearnerSample
from rlhf.config.schema import Config
from rlhf.trajectories import Columns, SamplingMask

VOCABULARY = 104


def make_config(
    model_folder: Path | str, reward_folder: Path | str | None = None, **overrides: dict[str, Any]
) -> Config:
    """A float32 configuration for these models; `overrides` go into its sections."""
    reward: dict[str, Any] = {"functions": [{"name": "length"}]}
    if reward_folder is not None:
        reward["model"] = {"path": str(reward_folder), "dtype": "float32"} | overrides.pop("reward_model", {})
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"prompts": {"source": "jsonl", "path": "unused.jsonl"}},
        "reward": reward,
        "policy": {"max_tokens_per_microbatch": 60},
        # One thread a process: several share the machine's cores.
        "run": {"deterministic": True},
    }
    for section, values in overrides.items():
        sections[section] = {**sections.get(section, {}), **values}
    return Config.model_validate(sections)


def make_sample(index: int, prompt: Sequence[int], response: Sequence[int], mask: SamplingMask | None) -> LearnerSample:
    """A sample whose engine log-probs are made up; four to a group."""
    columns = Columns.from_completion(prompt, response, [-1.0] * len(response), 0, mask)
    total = len(prompt) + len(response)
    return LearnerSample(f"{index // 4}-{index % 4}", index // 4, total, len(prompt), columns)


def make_samples(count: int = 8, masked: bool = False) -> list[LearnerSample]:
    """Samples of different lengths, four to a prompt, with any ids in them.

    `masked`: each token was one of itself and three others.
    """
    generator = np.random.default_rng(0)
    samples, start = [], np.zeros(0, np.int64)
    for index in range(count):
        if index % 4 == 0:
            start = generator.integers(0, VOCABULARY, int(generator.integers(3, 12)))
        prompt, response = len(start), int(generator.integers(1, 16))
        ids = np.concatenate([start, generator.integers(0, VOCABULARY, response)])
        mask = None
        if masked:
            others = generator.integers(0, VOCABULARY, (response, 3))
            allowed = [np.unique([token, *row]) for token, row in zip(ids[prompt:], others, strict=True)]
            offsets = np.cumsum([0, *map(len, allowed)]).astype(np.int64)
            mask = SamplingMask(offsets, np.concatenate(allowed).astype(np.int32), allowed=True)
        samples.append(make_sample(index, ids[:prompt].tolist(), ids[prompt:].tolist(), mask))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()

    from rlhf.models.batch import pad_batch
    from rlhf.models.distributed import shard_for_inference
    from rlhf.models.value import load_value_model
    from rlhf.scorers.reference import ReferenceScorer
    from rlhf.scorers.reward import RewardModelScorer

    master = ("127.0.0.1", arguments.port)
    found: dict[str, Any] = {}
    reward = arguments.folder / "reward"
    for name in ("untied", "tied"):
        config = make_config(arguments.folder / name, reference={"sharded": True})
        reference = ReferenceScorer(config, arguments.rank, 2)
        reference.setup(master)
        found[f"reference {name}"] = [
            reference.score(samples)[1]
            for samples in (make_samples(), make_samples(1), [], make_samples(5, masked=True))
        ]
    wide = make_config(arguments.folder / "untied", reference={"sharded": True}, model={"dtype": "bfloat16"})
    reference = ReferenceScorer(wide, arguments.rank, 2)
    reference.setup(master)
    found["reference bfloat16"] = reference.score(make_samples())[1]
    found["buffers"] = {name: buffer.dtype for name, buffer in reference._model.module.named_buffers()}
    config = make_config(arguments.folder / "untied", reward, reward_model={"sharded": True})
    scorer = RewardModelScorer(config, arguments.rank, 2)
    scorer.setup(master)
    found["reward"] = [scorer.score(samples)[1] for samples in (make_samples(), make_samples(1), [])]
    found["largest parameter held"] = max(p.numel() for p in scorer._model.module.parameters())

    columns = [sample.columns for sample in make_samples() if isinstance(sample.columns, Columns)]
    for head, path in (("new", arguments.folder / "untied"), ("checkpoint", reward)):
        value = shard_for_inference(lambda p=path, h=head: load_value_model(str(p), "float32", h), "float32")
        with torch.no_grad():
            found[f"values {head}"] = value(pad_batch(columns, "cpu"))
    plain = make_config(arguments.folder / "untied", arguments.folder / "untied", reward_model={"sharded": True})
    try:
        RewardModelScorer(plain, arguments.rank, 2).setup(master)
    except ValueError as error:
        found["plain language model"] = str(error)
    broken = [replace(sample, total_tokens=sample.total_tokens + 1) for sample in make_samples(2)]
    try:
        scorer.score(broken)
    except ValueError as error:
        found["broken sample"] = str(error)
    scorer.close()
    torch.save(found, arguments.folder / f"found-{arguments.rank}.pt")


if __name__ == "__main__":
    main()
