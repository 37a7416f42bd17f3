"""Advantages and returns of a step's samples, as columns.

The batch is estimated in one place, so a statistic over the batch (whitening, a batch's standard deviation) is over
all of it, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.algorithms.advantages import AdvantageBatch, Estimator, estimate_advantages
from rlhf.algorithms.catalogue import needs_critic
from rlhf.algorithms.kl import kl_per_token
from rlhf.batching import Estimates, LearnerSample, RewardedSample, ScoredColumns, fetch_columns, fetch_scores
from rlhf.config.schema import Config
from rlhf.models.batch import flatten, unflatten
from rlhf.trajectories import Columns


def estimate(
    rewarded: Sequence[RewardedSample], config: Config, kl_coefficient: float, estimator: Estimator | None = None
) -> tuple[Estimates, list[ScoredColumns]]:
    """Estimate the advantages of a step's samples.

    The columns are the advantages of each group, in the order of the samples, and after them the returns of each, where
    the estimator has any (those of a critic).

    With KL in the reward, `kl_coefficient` times the KL of each token is taken off its reward; the KL is that of the
    policy that the batch starts with. Raises `ValueError` where an estimator can't work with these rewards.
    """
    samples = [entry.sample for entry in rewarded]
    deadline_s = config.placement.deadline_s
    fetched = fetch_columns(samples, deadline_s)
    columns = [fetched[sample.sample_id] for sample in samples]
    penalties_N = _penalties(samples, columns, config, kl_coefficient)
    values = fetch_scores(samples, "values", deadline_s)
    baselines = [entry.baseline for entry in rewarded]
    batch = AdvantageBatch(
        rewards_S=torch.tensor([entry.reward for entry in rewarded], dtype=torch.float64),
        groups_S=torch.tensor([sample.group_id for sample in samples]),
        lengths_S=torch.tensor([sample.response_tokens for sample in samples]),
        penalties_N=penalties_N,
        values_N=None if values is None else flatten(columns, [values[s.sample_id] for s in samples], "cpu").double(),
        baselines_S=None if None in baselines else torch.tensor(baselines, dtype=torch.float64),
    )
    estimated = estimate_advantages(batch, config.algorithm, estimator)
    if (estimated.returns_N is not None) != needs_critic(config):
        raise ValueError(
            f"algorithm.advantage {config.algorithm.advantage}: an estimator gives returns if it needs a critic, which "
            f"is trained towards them, and otherwise none; this one gave {'none' if needs_critic(config) else 'some'}"
        )
    columns_by_group = _by_group(samples, unflatten(columns, estimated.advantages_N))
    if estimated.returns_N is not None:
        columns_by_group += _by_group(samples, unflatten(columns, estimated.returns_N))
    means = [float(part.mean()) for part in torch.split(estimated.advantages_N, batch.lengths_S.tolist())]
    advantages = {sample.sample_id: mean for sample, mean in zip(samples, means, strict=True)}
    metrics = {
        "advantage/mean": float(estimated.advantages_N.mean()),
        "advantage/std": float(estimated.advantages_N.std(correction=0)),
        "advantage/nonzero_fraction": float((estimated.advantages_N != 0).double().mean()),
    }
    if config.algorithm.kl.where == "reward" and kl_coefficient > 0:
        metrics["advantage/kl_penalty_mean"] = float(penalties_N.sum()) / len(samples)
    return Estimates(metrics, advantages), columns_by_group


def _by_group(samples: Sequence[LearnerSample], arrays: Sequence[npt.NDArray[np.float32]]) -> list[ScoredColumns]:
    groups: dict[int, ScoredColumns] = {}
    for sample, array in zip(samples, arrays, strict=True):
        groups.setdefault(sample.group_id, {})[sample.sample_id] = array
    return list(groups.values())


def _penalties(
    samples: Sequence[LearnerSample], columns: Sequence[Columns], config: Config, kl_coefficient: float
) -> Tensor:
    """KL coefficient times KL of each response token, float64 [N]; zeros where the reward holds no KL."""
    kl, deadline_s = config.algorithm.kl, config.placement.deadline_s
    zeros = torch.zeros(sum(sample.response_tokens for sample in samples), dtype=torch.float64)
    if kl.where != "reward" or kl_coefficient <= 0:
        return zeros
    reference = fetch_scores(samples, "reference", deadline_s)
    old = fetch_scores(samples, "old_logprobs", deadline_s)
    if reference is None or (old is None and config.algorithm.old_logprobs != "engine"):
        raise ValueError("KL in the reward needs log-probs of policy and reference for every sample")
    policy = [columns[i].logprobs if old is None else old[s.sample_id] for i, s in enumerate(samples)]
    policy_N = flatten(columns, policy, "cpu")
    reference_N = flatten(columns, [reference[s.sample_id] for s in samples], "cpu")
    return kl_coefficient * kl_per_token(policy_N, reference_N, kl.estimator).double()
