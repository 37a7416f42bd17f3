"""Advantages: how much better than expected each response, or each of its tokens, was.

Invariants
- Arrays are flat over response tokens, sample after sample, or hold one entry a sample. There is no padding, so no
  masked slot can be read by mistake.
- A group is an explicit id; neither the order of samples nor the size of a micro-batch says which belong together.
- One call sees the whole step, in one process: statistics over "the batch" are over all its samples.
- Everything is float64, and no standard deviation gets an epsilon: numbers that are equal up to rounding are exactly
  the mean, and what would be divided by 0 is exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms.registry import own_advantage
from rlhf.algorithms.shaping import EQUAL_WITHIN
from rlhf.config.catalogue import advantage_spec
from rlhf.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class AdvantageBatch:
    """The S samples of one step, with N response tokens in all, sample after sample.

    rewards_S float64: reward of the whole response, shaped, without the KL penalty. groups_S int64: samples of one
    prompt share a number, any number. lengths_S int64: response tokens, at least 1. penalties_N float64: KL coefficient
    times the KL of each token, zeros without KL in the reward. values_N float64: the critic's values, entry t of the
    state before response token t. baselines_S float64: the reward of the greedy response to the sample's prompt.

    Raises `ValueError` for other dtypes, shapes that don't fit together, and rewards or penalties that are not finite.
    """

    rewards_S: Tensor
    groups_S: Tensor
    lengths_S: Tensor
    penalties_N: Tensor
    values_N: Tensor | None = None
    baselines_S: Tensor | None = None

    def __post_init__(self) -> None:
        samples = self.rewards_S.numel()
        if samples == 0:
            raise ValueError("advantages of no samples: at least one is needed")
        _check_array("lengths_S", self.lengths_S, torch.int64, samples)
        if int(self.lengths_S.min()) < 1:
            raise ValueError(f"lengths_S holds {int(self.lengths_S.min())}: a response has at least one token")
        tokens = int(self.lengths_S.sum())
        _check_array("groups_S", self.groups_S, torch.int64, samples)
        _check_array("rewards_S", self.rewards_S, torch.float64, samples)
        _check_array("penalties_N", self.penalties_N, torch.float64, tokens)
        _check_finite("rewards_S", self.rewards_S)
        _check_finite("penalties_N", self.penalties_N)
        if self.values_N is not None:
            _check_array("values_N", self.values_N, torch.float64, tokens)
        if self.baselines_S is not None:
            _check_array("baselines_S", self.baselines_S, torch.float64, samples)

    @property
    def rows_N(self) -> Tensor:
        """The sample that each token belongs to, 0 to S - 1; int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths_S)), self.lengths_S)

    @property
    def last_S(self) -> Tensor:
        """Where each sample's last token stands among the N; int64."""
        return self.lengths_S.cumsum(0) - 1

    @property
    def token_rewards_N(self) -> Tensor:
        """Reward of each token: minus its KL penalty, and on a sample's last token the reward of the response."""
        return (-self.penalties_N).index_add(0, self.last_S, self.rewards_S)

    @property
    def sequence_rewards_S(self) -> Tensor:
        """Reward of each response, minus the KL penalties of all its tokens."""
        return self.rewards_S.index_add(0, self.rows_N, -self.penalties_N)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of N tokens, and what the critic is trained towards where there is one; float64."""

    advantages_N: Tensor
    returns_N: Tensor | None = None


# An estimator gives one advantage for each token [N], or one for each sample [S] that all its tokens share.
Estimator = Callable[[AdvantageBatch, AlgorithmConfig], Advantages | Tensor]


def estimate_advantages(
    batch: AdvantageBatch, config: AlgorithmConfig, estimator: Estimator | None = None
) -> Advantages:
    """Advantages of every token by the estimator `algorithm.advantage`, or by `estimator` in its place.

    Raises `ValueError` when the estimator is unknown, when what it needs is missing or not finite, and when what it
    returns has another shape or is not finite.
    """
    name, spec = config.advantage, advantage_spec(config.advantage)
    estimator = estimator or ESTIMATORS.get(name) or own_advantage(name)
    if estimator is None:
        raise ValueError(f"unknown advantage estimator {name!r}: use one of {', '.join(ESTIMATORS)}, or register it")
    if spec.needs_critic:
        _check_present(name, "values_N", "the critic's values", batch.values_N)
    if spec.needs_greedy:
        _check_present(name, "baselines_S", "the rewards of greedy responses", batch.baselines_S)
    result = estimator(batch, config)
    found = result if isinstance(result, Advantages) else Advantages(result)
    advantages_N = _per_token(name, "advantages", found.advantages_N, batch, per_sample=spec.level == "sequence")
    if found.returns_N is None:
        return Advantages(advantages_N)
    return Advantages(advantages_N, _per_token(name, "returns", found.returns_N, batch, per_sample=False))


def gae(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation, arXiv:1506.02438, eq. 16, with the returns that the critic learns.

    delta_t = r_t + gamma V_(t+1) - V_t, with V = 0 after the last token; A_t = delta_t + gamma lambda A_(t+1); returns
    are A + V. With `whiten` the advantages are then whitened over the tokens of the batch, which is usual for PPO; the
    returns are not.
    """
    values_N = batch.values_N
    assert values_N is not None  # `estimate_advantages` refuses a batch without
    next_values_N = torch.cat([values_N[1:], values_N.new_zeros(1)])
    next_values_N[batch.last_S] = 0.0
    deltas_N = batch.token_rewards_N + config.gamma * next_values_N - values_N
    advantages_N = discounted_sums(deltas_N, batch.lengths_S, config.gamma * config.gae_lambda)
    return Advantages(whiten(advantages_N) if config.whiten else advantages_N, advantages_N + values_N)


def grpo(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Group-relative advantages, GRPO, arXiv:2402.03300, section 4.1.2: (r - mean) / std, over the sample's group.

    Population standard deviation, no epsilon. `normalize: batch` divides by that of all rewards of the step instead
    (arXiv:2508.08221), `none` by nothing. Equal rewards, and a group of one, give exactly 0.
    """
    rewards_S, groups = batch.sequence_rewards_S, _Groups.of(batch.groups_S)
    deviations_S = groups.deviations(rewards_S)
    if config.normalize == "none":
        return deviations_S
    if config.normalize == "group":
        return _quotient(deviations_S, groups.root_mean_squares(deviations_S))
    step = _Groups.one(len(rewards_S))
    return _quotient(deviations_S, step.root_mean_squares(step.deviations(rewards_S)))


def dr_grpo(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus the mean of the group, not divided by anything; Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return _Groups.of(batch.groups_S).deviations(batch.sequence_rewards_S)


def rloo(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus the mean of the group's other samples; REINFORCE leave-one-out, arXiv:2402.14740, section 2.3.

    That is n / (n - 1) times the deviation from the mean of all n. A group of one gives 0.
    """
    groups = _Groups.of(batch.groups_S)
    return _quotient(groups.sizes * groups.deviations(batch.sequence_rewards_S), groups.sizes - 1)


def reinforce(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Discounted sum of the rewards from each token on, without a baseline; Williams, 1992, section 5 (REINFORCE)."""
    return discounted_sums(batch.token_rewards_N, batch.lengths_S, config.gamma)


def reinforce_plus_plus(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """The returns of `reinforce`, whitened over the batch's tokens; REINFORCE++, arXiv:2501.03262v9, eq. 4 and 5."""
    return whiten(reinforce(batch, config))


def reinforce_plus_plus_baseline(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus the mean of the group, whitened over all tokens of the batch.

    REINFORCE++ with baseline, arXiv:2501.03262v9, eq. 6 and 7. The mean and standard deviation of the whitening count
    a sample once for each of its tokens.
    """
    deviations_S = _Groups.of(batch.groups_S).deviations(batch.sequence_rewards_S)
    return whiten(deviations_S[batch.rows_N])[batch.last_S]


def remax(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus that of the greedy response to the same prompt; ReMax, arXiv:2310.10505, algorithm 1."""
    assert batch.baselines_S is not None  # `estimate_advantages` refuses a batch without
    return batch.sequence_rewards_S - batch.baselines_S


def opo(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus the group's length-weighted mean, sum(l r) / sum(l); OPO, arXiv:2505.23585v2, section 3.2."""
    return _Groups.of(batch.groups_S).deviations(batch.sequence_rewards_S, batch.lengths_S.double())


def maxrl(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """(r - mean) / mean over the group; MaxRL, arXiv:2602.02710v3, section 4.3. A group without any reward gives 0.

    The mean stands for a probability of success. Raises `ValueError` for negative rewards, and for KL penalties, with
    which rewards would be negative.
    """
    if bool((batch.penalties_N != 0).any()):
        raise ValueError(
            "maxrl can't have KL in the reward, its rewards must be at least 0: use algorithm.kl.where=loss"
        )
    if bool((batch.rewards_S < 0).any()):
        raise ValueError(
            f"maxrl needs rewards of at least 0, like 0 for wrong and 1 for right: {int((batch.rewards_S < 0).sum())} "
            f"of {len(batch.rewards_S)} are negative, the smallest is {float(batch.rewards_S.min())}"
        )
    groups = _Groups.of(batch.groups_S)
    return _quotient(groups.deviations(batch.rewards_S), groups.means(batch.rewards_S))


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "maxrl": maxrl,
}


def whiten(values_N: Tensor) -> Tensor:
    """(v - mean) / std over all entries [N], with the population standard deviation.

    Entries that are equal up to rounding, a single one among them, give exactly 0.
    """
    batch = _Groups.one(len(values_N))
    deviations_N = batch.deviations(values_N)
    return _quotient(deviations_N, batch.root_mean_squares(deviations_N))


def discounted_sums(values_N: Tensor, lengths_S: Tensor, factor: float) -> Tensor:
    """y_t = v_t + factor * y_(t+1) within each sample, [N], with y = 0 after a sample's last token."""
    sums_N, last_S = values_N.clone(), lengths_S.cumsum(0) - 1
    # One step for each distance from the end, for all samples at once that are that long.
    for distance in range(1, int(lengths_S.max())):
        here = last_S[lengths_S > distance] - distance
        sums_N[here] += factor * sums_N[here + 1]
    return sums_N


@dataclass(frozen=True, slots=True)
class _Groups:
    """Statistics over groups of entries; every result has one value an entry, that of its group.

    members holds each entry's group, 0 to count - 1.
    """

    members: Tensor
    count: int

    @staticmethod
    def of(ids: Tensor) -> _Groups:
        found, members = torch.unique(ids, return_inverse=True)
        return _Groups(members, len(found))

    @staticmethod
    def one(entries: int) -> _Groups:
        return _Groups(torch.zeros(entries, dtype=torch.int64), 1)

    @property
    def sizes(self) -> Tensor:
        return torch.bincount(self.members, minlength=self.count).double()[self.members]

    def sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.members, values)[self.members]

    def means(self, values: Tensor) -> Tensor:
        return self.sums(values) / self.sizes

    def maxima(self, values: Tensor) -> Tensor:
        lowest = values.new_full((self.count,), -torch.inf)
        return lowest.scatter_reduce(0, self.members, values, "amax")[self.members]

    def deviations(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Deviations from the (weighted) mean; exactly 0 in a group whose values are equal up to rounding."""
        # Counted from the lowest, equal values are exactly 0, and a large common offset costs the mean no digits.
        above = values + self.maxima(-values)
        means = self.means(above) if weights is None else self.sums(weights * above) / self.sums(weights)
        equal = self.maxima(above) <= EQUAL_WITHIN * self.maxima(values.abs())
        return torch.where(equal, 0.0, above - means)

    def root_mean_squares(self, values: Tensor) -> Tensor:
        """Root of the mean square: for deviations from the mean, the population standard deviation."""
        # In units of the largest, so that the squares of very small or large values stay in range.
        largest = self.maxima(values.abs())
        return largest * self.means(_quotient(values, largest).square()).sqrt()


def _quotient(numerators: Tensor, denominators: Tensor) -> Tensor:
    """The quotient; 0 / 0 is 0. Wherever a denominator of this file is 0, all that it stands for is 0 too."""
    return numerators / torch.where(denominators == 0, 1.0, denominators)


def _check_array(name: str, values: Tensor, dtype: torch.dtype, entries: int) -> None:
    if values.dtype != dtype or values.shape != (entries,):
        raise ValueError(
            f"{name} is {values.dtype} of shape {list(values.shape)}: {dtype} of shape [{entries}] is needed"
        )


def _check_finite(name: str, values: Tensor) -> None:
    bad = (~values.isfinite()).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise ValueError(f"{name}: {len(bad)} of {len(values)} are not finite, first {float(values[first])} at {first}")


def _check_present(estimator: str, name: str, what: str, values: Tensor | None) -> None:
    if values is None:
        raise ValueError(f"{estimator} needs {what}, and the batch has no {name}")
    _check_finite(name, values)


def _per_token(estimator: str, what: str, values: object, batch: AdvantageBatch, *, per_sample: bool) -> Tensor:
    """An estimator's result as float64 [N], checked; one entry a sample is repeated for each of its tokens."""
    samples, tokens = len(batch.lengths_S), len(batch.penalties_N)
    if not isinstance(values, Tensor):
        raise ValueError(f"{estimator}: its {what} are a {type(values).__name__}, a tensor is needed")
    shapes = [(samples,)] if per_sample else [(samples,), (tokens,)]
    if tuple(values.shape) not in shapes:
        raise ValueError(
            f"{estimator}: its {what} have the shape {list(values.shape)}, needed is [{samples}], one for each sample, "
            + ("as it has no level='token'" if per_sample else f"or [{tokens}], one for each response token")
        )
    values = values.detach().to("cpu", torch.float64)
    _check_finite(f"{estimator}: its {what}", values)
    return values if len(values) == tokens else values[batch.rows_N]
