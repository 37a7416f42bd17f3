"""One rank of a learner in a process of its own: runs every check of `test_learner.py` and leaves the findings.

The checks share the process because starting it (torch, DeepSpeed, the process group) costs more than they do.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.algorithms.losses import Surrogate, SurrogateInput
from rlhf.batching import LearnerSample
from rlhf.config.schema import AlgorithmConfig, Config
from rlhf.learners.critic import CriticLearner
from rlhf.learners.critic_update import CriticUpdate
from rlhf.learners.policy import PolicyLearner
from rlhf.learners.policy_update import PolicyUpdate
from rlhf.learners.ranks import LearnerError
from rlhf.learners.update import Turn
from rlhf.models.load import DTYPES
from rlhf.trajectories import Columns
from rlhf.weights.source import LearnerSource

VOCABULARY = 104
# Less than the largest matrix of the tiny model, and more than several of the smaller ones.
BUCKET_BYTES = 1 << 16


def make_config(model: Path | str, dtype: str = "float32", **overrides: dict[str, Any]) -> Config:
    """A configuration for the model in that folder; `overrides` go into its sections."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": dtype},
        "data": {"prompts": {"source": "jsonl", "path": "unused.jsonl"}, "max_prompt_tokens": 24},
        "rollout": {"max_new_tokens": 16, "samples_per_prompt": 4, "prompts_per_step": 2},
        "reward": {"functions": [{"name": "length"}]},
        "policy": {"max_tokens_per_microbatch": 4096, "learning_rate": 1e-3},
        "placement": {"deadline_s": 60},
        # The samples' engine log-probs are made up; what the correction does with true ones is checked by itself.
        "algorithm": {"correction": {"method": "none"}},
        # One thread a process: three of them share the machine's cores.
        "run": {"deterministic": True},
    }
    for section, values in overrides.items():
        sections[section] = {**sections.get(section, {}), **values}
    return Config.model_validate(sections)


def make_sample(index: int, prompt: list[int], response: list[int], advantage: float) -> LearnerSample:
    """A sample whose engine log-probs are made up; four to a group."""
    columns = Columns.from_completion(tuple(prompt), response, [-1.0] * len(response), 0)
    sample = LearnerSample(f"{index // 4}-{index % 4}", index // 4, len(prompt) + len(response), len(prompt), columns)
    return with_advantage(sample, advantage)


def advantage_of(sample: LearnerSample) -> float:
    """The advantage that all tokens of a sample share."""
    scores = sample.scores["advantages"]
    assert isinstance(scores, dict)
    return float(scores[sample.sample_id][0])


def with_returns(samples: list[LearnerSample], seed: int = 0) -> list[LearnerSample]:
    """The samples with values and returns for a critic."""
    generator = np.random.default_rng(seed)
    scores = [
        {s.sample_id: generator.normal(size=s.total_tokens).astype(np.float32) for s in samples} for _ in range(2)
    ]
    return [sample.with_scores(values=scores[0], returns=scores[1]) for sample in samples]


def with_advantage(sample: LearnerSample, advantage: float) -> LearnerSample:
    """The sample with one advantage for all its tokens."""
    return sample.with_scores(advantages={sample.sample_id: np.full(sample.total_tokens, advantage, np.float32)})


def make_samples(seed: int = 0, count: int = 8) -> list[LearnerSample]:
    """Samples of different lengths, four to a prompt."""
    generator = np.random.default_rng(seed)
    samples, prompt = [], list[int]()
    for index in range(count):
        if index % 4 == 0:
            prompt = generator.integers(4, VOCABULARY, int(generator.integers(3, 12))).tolist()
        response = generator.integers(4, VOCABULARY, int(generator.integers(1, 16))).tolist()
        samples.append(make_sample(index, prompt, response, float(generator.normal())))
    return samples


class Rank:
    """A learner and what the checks do with it."""

    def __init__(
        self, arguments: argparse.Namespace, config: Config, kind: type[PolicyLearner | CriticLearner] = PolicyLearner
    ) -> None:
        self.config = config
        self.learner: Any = kind(config, arguments.rank, arguments.world, "cpu")
        self.learner.setup(("127.0.0.1", arguments.port))

    def configure(self, surrogate: Surrogate | None = None, **overrides: dict[str, Any]) -> None:
        """Change settings that the update loop reads, or the loss, under the same engine."""
        sections = self.config.model_dump()
        for section, values in overrides.items():
            sections[section] = {**sections[section], **values}
        config = Config.model_validate(sections)
        if isinstance(self.learner, CriticLearner):
            self.learner._update = CriticUpdate(config, self.learner._zero, self.learner._ranks)
        else:
            self.learner._update = PolicyUpdate(config, self.learner._zero, self.learner._ranks, surrogate)

    def gradients(self, samples: list[LearnerSample]) -> dict[str, torch.Tensor]:
        """Loss and unclipped gradients of one optimizer step, whole on every rank; they are discarded again."""
        from deepspeed.utils import safe_get_full_grad

        update = self.learner._update
        shard = update.shard(samples, 1)
        (minibatch,) = shard.layout.minibatches
        loss = update.accumulate(minibatch, shard, update.meter(shard), Turn())
        found = {"loss": torch.tensor(self.learner._ranks.sum_of_shares([loss]))}
        for name, parameter in self.learner._zero.model.lm.named_parameters():
            found[name] = safe_get_full_grad(parameter).clone()
        self.learner._zero.discard_gradients()
        return found

    def logprobs(self, samples: list[LearnerSample]) -> dict[str, Any]:
        """Log-probs of this rank's share."""
        scored: dict[str, Any] = self.learner._update.score(samples)
        return scored

    def everyones(self, samples: list[LearnerSample]) -> dict[str, Any]:
        """Log-probs of all ranks' shares."""
        shares: list[Any] = [None] * self.learner._world_size
        torch.distributed.all_gather_object(shares, self.logprobs(samples))
        return {sample_id: values for share in shares for sample_id, values in share.items()}

    def with_old(self, samples: list[LearnerSample]) -> list[LearnerSample]:
        """The samples with old log-probs, as a batch with several updates has them."""
        old = self.everyones(samples)
        return [sample.with_scores(old_logprobs=old) for sample in samples]

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, whole on every rank."""
        found = {}
        for name, parameter in self.learner.named_parameters_for_sync():
            with self.learner.gather([parameter]):
                found[name] = parameter.detach().clone()
        return found

    def adapters(self) -> dict[str, torch.Tensor]:
        """All that is trained of a policy with adapters, whole on every rank."""
        found = {}
        for name, parameter in self.learner.module.named_parameters():
            if parameter.requires_grad:
                with self.learner._zero.gather([parameter]):
                    found[name] = parameter.detach().clone()
        return found

    def failure(self, samples: list[LearnerSample]) -> str:
        """The message with which an update of these samples fails."""
        try:
            self.learner.update(1, samples)
        except LearnerError as error:
            return str(error)
        return "no failure"


def check_stage(arguments: argparse.Namespace, dtype: str, stage: int) -> dict[str, Any]:
    """Everything that is checked at each ZeRO stage in each dtype, on one learner, in an order that matters."""
    found: dict[str, Any] = {}
    model = Path(arguments.models) / "untied"
    rank = Rank(arguments, make_config(model, dtype, policy={"zero_stage": stage}))
    samples = make_samples()
    found["start"] = rank.weights()

    for layout, tokens in (("1x8", 4096), ("middle", 60), ("8x1", 1)):
        rank.configure(policy={"max_tokens_per_microbatch": tokens})
        found[f"gradients {layout}"] = rank.gradients(samples)
    found["gradients of one sample"] = rank.gradients(samples[:1])
    rank.configure()
    rank.learner.dry_run()
    found["gradients after dry run"] = rank.gradients(samples)
    for aggregation in ("token_mean", "sequence_mean_token_mean"):
        rank.configure(algorithm={"aggregation": aggregation}, policy={"max_tokens_per_microbatch": arguments.world})
        pair = [make_sample(0, [5, 76, 5], [84], 1.0), make_sample(4, [5, 76], [84, 7, 2], -1.0)]
        found[f"loss of one and three tokens, {aggregation}"] = float(rank.gradients(pair)["loss"])
    rank.configure()
    found["logprobs"] = rank.logprobs(samples)

    # None of these may move a weight.
    last = arguments.rank == arguments.world - 1
    broken = [replace(s, total_tokens=s.total_tokens + 1) for s in samples] if last else samples
    found["one rank fails"] = rank.failure(broken)
    found["NaN advantage"] = rank.failure([*samples[:2], with_advantage(samples[2], float("nan")), *samples[3:]])
    found["gradient overflows"] = rank.failure([with_advantage(s, 3e38) for s in samples])
    rank.learner.update(1, [with_advantage(s, 0.0) for s in samples])
    rank.configure(policy={"learning_rate": 0.0, "epochs": 2, "minibatches": 2})
    found["metrics at rate 0"] = rank.learner.update(1, rank.with_old(samples)).metrics
    found["unmoved"] = rank.weights()
    return found


def check_training(arguments: argparse.Namespace, model: str, dtype: str, stage: int) -> dict[str, Any]:
    """Three updates and an export."""
    rank = Rank(arguments, make_config(Path(arguments.models) / model, dtype, policy={"zero_stage": stage}))
    found: dict[str, Any] = {"metrics": [], "names": [name for name, _ in rank.learner.named_parameters_for_sync()]}
    for step in (1, 2, 3):
        result = rank.learner.update(step, make_samples(step))
        found["metrics"].append(result.metrics)
        found["spans"] = [s.name for s in result.spans]
    found["weights"] = rank.weights()
    found["operations"] = rank.learner._zero.operations
    rank.learner.export(Path(arguments.out) / f"export-{arguments.world}-{model}-{dtype}-{stage}")
    return found


def check_adapters(arguments: argparse.Namespace, dtype: str, stage: int) -> dict[str, Any]:
    """Three updates of adapters and an export; what was frozen and what is the reference, before and after."""
    policy = {"zero_stage": stage, "lora": {"rank": 4}}
    rank = Rank(arguments, make_config(Path(arguments.models) / "tied", dtype, policy=policy))
    learner, samples = rank.learner, make_samples()
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        found[f"frozen {when}"] = rank.weights()
        found[f"reference {when}"] = learner.score_as_reference(samples)[1]
        if when == "before":
            found["policy before"] = rank.logprobs(samples)
            learner.dry_run()
            found["metrics"] = [learner.update(step, make_samples(step)).metrics for step in (1, 2, 3)]
    found["adapters"] = rank.adapters()
    source = LearnerSource(learner, DTYPES[dtype], BUCKET_BYTES)
    found["sent"] = {name: tensor.clone() for name, tensor in source}
    learner.export(Path(arguments.out) / f"export-{arguments.world}-adapters-{dtype}-{stage}")
    return found


def check_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What does not depend on the stage: dropout, temperature, parity, minibatches, reference KL."""
    found: dict[str, Any] = {}
    samples = make_samples()
    rank = Rank(arguments, make_config(Path(arguments.models) / "dropout", rollout={"sampling": {"temperature": 0.5}}))
    first, second = rank.logprobs(samples), rank.logprobs(samples)
    found["log-probs twice"] = (first, second)
    rank.configure(policy={"learning_rate": 0.0, "epochs": 2, "minibatches": 2})
    found["dropout"] = rank.learner.update(1, rank.with_old(samples)).metrics
    rank.configure(policy={"learning_rate": 0.0})

    def with_engine(logprobs: dict[str, Any], shift: int) -> list[LearnerSample]:
        changed = []
        for sample in samples:
            assert isinstance(sample.columns, Columns)
            values = sample.columns.logprobs.copy()
            values[sample.prompt_tokens :] = np.roll(logprobs[sample.sample_id][sample.prompt_tokens :], shift)
            changed.append(replace(sample, columns=replace(sample.columns, logprobs=values)))
        return changed

    everyones = rank.everyones(samples)
    found["parity"] = rank.learner.update(1, with_engine(everyones, 0)).metrics
    found["parity, shifted by one"] = rank.learner.update(1, with_engine(everyones, 1)).metrics
    rank.configure(policy={"learning_rate": 0.0}, algorithm={"kl": {"where": "loss", "coefficient": 2.0}})
    scored = {sample_id: values - 0.5 for sample_id, values in everyones.items()}
    found["kl"] = rank.learner.update(
        1, [with_advantage(s, 0.0).with_scores(reference=scored) for s in samples]
    ).metrics
    poisoned = {sample_id: np.full_like(values, np.nan) for sample_id, values in everyones.items()}
    rank.configure(policy={"learning_rate": 0.0}, algorithm={"kl": {"where": "loss", "coefficient": 0.0}})
    found["NaN reference, coefficient 0"] = rank.learner.update(
        1, [s.with_scores(reference=poisoned) for s in samples]
    ).metrics
    found["no reference"] = rank.learner.update(1, samples).metrics
    rank.configure(policy={"learning_rate": 0.0, "max_tokens_per_microbatch": 2, "longer_sequences": "refuse"})
    found["longer sequences refused"] = rank.failure(samples)
    return found


def check_critic(arguments: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Gradients, values and updates of a critic that starts from a reward model with its head."""
    reward, policy = Path(arguments.models) / "reward", Path(arguments.models) / "untied"
    found: dict[str, Any] = {}
    settings = {"zero_stage": stage, "learning_rate": 1e-2, "model": str(reward), "value_clip": 0.5}
    rank = Rank(arguments, make_config(policy, algorithm={"advantage": "gae"}, critic=settings), CriticLearner)
    samples = with_returns(make_samples())
    for layout, tokens in (("1x8", 4096), ("8x1", 1)):
        rank.configure(critic={"max_tokens_per_microbatch": tokens})
        found[f"gradients {layout}"] = rank.gradients(samples)
    rank.configure()
    rank.learner.dry_run()
    found["gradients after dry run"] = rank.gradients(samples)
    found["gradients of one sample"] = rank.gradients(samples[:1])
    found["values"] = rank.logprobs(samples)
    # Values far from where they started are what is wanted here.
    rank.configure(critic={"value_clip": None})
    found["metrics"] = [rank.learner.update(step, samples).metrics for step in (1, 2, 3, 4, 5, 6)]
    found["no returns"] = rank.failure(make_samples())
    return found


def check_loss(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the loss is made of besides the surrogate, and a surrogate of the user's own that fails."""
    found: dict[str, Any] = {}
    rank = Rank(arguments, make_config(Path(arguments.models) / "untied", policy={"learning_rate": 0.0}))
    samples = [with_advantage(sample, 1.0) for sample in make_samples()]
    trainer = rank.everyones(samples)

    def sampled_from(shift: float) -> list[LearnerSample]:
        """The samples, their engine's log-probs `shift` nats below the trainer's."""
        return [
            replace(s, columns=replace(s.columns, logprobs=trainer[s.sample_id] - np.float32(shift)))  # type: ignore[type-var]
            for s in samples
        ]

    corrected = {"correction": {"method": "token_truncate"}}
    rank.configure(algorithm=corrected)
    found["engine agrees"] = rank.learner.update(1, sampled_from(0.0)).metrics
    found["engine four times less likely"] = rank.learner.update(1, sampled_from(float(np.log(4)))).metrics
    rank.configure(algorithm={**corrected, "entropy_coefficient": 0.5})
    found["entropy bonus"] = rank.learner.update(1, [with_advantage(s, 0.0) for s in sampled_from(0.0)]).metrics
    rank.configure(algorithm={"old_logprobs": "engine", "correction": {"method": "none"}, "clip": {"high": 0.5}})
    found["ratio from the engine"] = rank.learner.update(1, sampled_from(float(np.log(4)))).metrics

    def own_loss(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
        if arguments.rank == arguments.world - 1:
            raise RuntimeError("the user's own mistake")
        return -inputs.advantages_N * inputs.ratio_N, torch.zeros_like(inputs.ratio_N, dtype=torch.bool)

    rank.configure(own_loss)
    found["own loss fails on the last rank"] = rank.failure(samples)
    rank.configure(lambda inputs, config: (-2 * inputs.advantages_N * inputs.ratio_N, inputs.ratio_N > 9))
    found["own loss"] = rank.learner.update(1, samples).metrics
    return found


def parse() -> argparse.Namespace:
    """This rank's place, and the folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--models")
    parser.add_argument("--out")
    return parser.parse_args()


def leave(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write down what this rank found, for `test_learner.run_ranks`."""
    torch.save(found, Path(arguments.out) / f"found-{arguments.world}-{arguments.rank}.pt")


def main() -> None:
    arguments = parse()
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            found[f"stage {stage} {dtype}"] = check_stage(arguments, dtype, stage)
        for model, dtype in (("untied", "float32"), ("tied", "float32"), ("tied", "bfloat16")):
            found[f"training {stage} {model} {dtype}"] = check_training(arguments, model, dtype, stage)
        for dtype in ("float32", "bfloat16"):
            found[f"adapters {stage} {dtype}"] = check_adapters(arguments, dtype, stage)
        found[f"critic {stage}"] = check_critic(arguments, stage)
    found["settings"] = check_settings(arguments)
    found["loss"] = check_loss(arguments)
    leave(found, arguments)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
