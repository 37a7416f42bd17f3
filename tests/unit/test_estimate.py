"""Advantages of a step from columns: where the reward's parts come from, and how results travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf.algorithms.advantages import Advantages
from rlhf.batching import LearnerSample, RewardedSample
from rlhf.learners.estimate import estimate
from rlhf.trajectories import Columns
from tests.unit.configs import build


def sample(group: int, index: int, response: int = 2, **scores: Any) -> LearnerSample:
    """Prompt of two tokens; the engine's log-probs are -2."""
    columns = Columns.from_completion((5, 76), [11] * response, [-2.0] * response, 0)
    sample_id = f"{group}-{index}"
    plain = LearnerSample(sample_id, group, 2 + response, 2, columns)
    return plain.with_scores(
        **{
            name: {sample_id: np.concatenate([[np.nan] * 2, values]).astype(np.float32)}
            for name, values in scores.items()
        }
    )


def advantages(parts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The response tokens' values of columns by group, of prompts of two tokens."""
    return {sample_id: values[2:].tolist() for part in parts for sample_id, values in part.items()}


def test_every_token_of_a_response_gets_its_advantage_and_the_prompt_gets_none() -> None:
    # Two groups: rewards 0 and 1 around 0.5, and 3 and 3.
    batch = [RewardedSample(sample(g, i, 2 + i), r) for g, i, r in ((0, 0, 0.0), (0, 1, 1.0), (1, 0, 3.0), (1, 1, 3.0))]
    estimates, columns = estimate(batch, build({}), 0.0)
    assert [list(part) for part in columns] == [["0-0", "0-1"], ["1-0", "1-1"]]
    assert advantages(columns) == {"0-0": [-1.0] * 2, "0-1": [1.0] * 3, "1-0": [0.0] * 2, "1-1": [0.0] * 3}
    assert all(np.isnan(values[:2]).all() for part in columns for values in part.values())
    assert estimates.advantages == {"0-0": -1.0, "0-1": 1.0, "1-0": 0.0, "1-1": 0.0}
    # Ten tokens: two of -1, three of 1; mean 0.1, mean square 0.5, variance 0.49.
    assert estimates.metrics["advantage/mean"] == pytest.approx(0.1)
    assert estimates.metrics["advantage/std"] == pytest.approx(0.7)
    assert estimates.metrics["advantage/nonzero_fraction"] == 0.5


KL_IN_REWARD = {"where": "reward", "estimator": "k1", "coefficient": 0.1}


def with_reference(gap: float, rewards: list[float]) -> list[RewardedSample]:
    """One group; the first sample's tokens are `gap` nats likelier under the policy than under the reference."""
    gaps = [gap] + [0.0] * (len(rewards) - 1)
    return [
        RewardedSample(sample(0, i, old_logprobs=[-1.0] * 2, reference=[-1.0 - gaps[i]] * 2), r)
        for i, r in enumerate(rewards)
    ]


def test_kl_in_the_reward_is_taken_off_each_token_before_returns() -> None:
    # Two tokens, 0.5 nats each, coefficient 0.1, score 1: token rewards -0.05 and 0.95, returns 0.90 and 0.95.
    config = build({"algorithm": {"advantage": "reinforce", "kl": KL_IN_REWARD}, "rollout": {"samples_per_prompt": 1}})
    estimates, columns = estimate(with_reference(0.5, [1.0]), config, 0.1)
    assert advantages(columns)["0-0"] == pytest.approx([0.90, 0.95])
    assert estimates.metrics["advantage/kl_penalty_mean"] == pytest.approx(0.1)


def test_kl_in_the_reward_changes_what_a_group_estimator_gives() -> None:
    # Equal rewards; the first response pays 0.1 x (0.5 + 0.5) = 0.1, so it is 0.05 below the mean.
    config = build({"algorithm": {"advantage": "dr_grpo", "kl": KL_IN_REWARD}})
    _, columns = estimate(with_reference(0.5, [1.0, 1.0]), config, 0.1)
    assert advantages(columns)["0-0"] == pytest.approx([-0.05] * 2)
    _, free = estimate(with_reference(0.5, [1.0, 1.0]), config, 0.0)
    assert advantages(free)["0-0"] == [0.0] * 2


def test_the_engines_log_probs_stand_in_where_the_ratio_starts_from_them() -> None:
    # Engine -2, reference -2.5 on two tokens: 0.1 x (0.5 + 0.5) off the score of 1.
    algorithm = {
        "advantage": "reinforce",
        "kl": KL_IN_REWARD,
        "old_logprobs": "engine",
        "correction": {"method": "none"},
    }
    config = build({"algorithm": algorithm, "rollout": {"samples_per_prompt": 1}})
    batch = [RewardedSample(sample(0, 0, reference=[-2.5] * 2), 1.0)]
    _, columns = estimate(batch, config, 0.1)
    assert advantages(columns)["0-0"] == pytest.approx([0.90, 0.95])


@pytest.mark.parametrize("scores", [{"reference": [-1.0] * 2}, {"old_logprobs": [-1.0] * 2}])
def test_kl_without_log_probs_of_both_models_is_an_error(scores: dict[str, list[float]]) -> None:
    config = build({"algorithm": {"kl": KL_IN_REWARD}})
    batch = [RewardedSample(sample(0, i, **scores), float(i)) for i in range(2)]
    with pytest.raises(ValueError, match="KL in the reward needs log-probs of policy and reference"):
        estimate(batch, config, 0.1)


def test_a_critic_gets_returns_by_group_after_the_advantages() -> None:
    # gamma 1, lambda 1, no whitening: the return of each token is the score, the advantage is the score less the value.
    config = build({"algorithm": {"advantage": "gae", "gae_lambda": 1.0, "whiten": False}})
    batch = [RewardedSample(sample(g, 0, values=[0.25, 0.5]), 1.0) for g in range(2)]
    _, columns = estimate(batch, config, 0.0)
    assert [list(part) for part in columns] == [["0-0"], ["1-0"], ["0-0"], ["1-0"]]
    assert advantages(columns[:2]) == {"0-0": [0.75, 0.5], "1-0": [0.75, 0.5]}
    assert advantages(columns[2:]) == {"0-0": [1.0, 1.0], "1-0": [1.0, 1.0]}


def test_a_greedy_response_is_the_baseline_of_its_prompt() -> None:
    config = build({"algorithm": {"advantage": "remax"}})
    batch = [RewardedSample(sample(g, 0), 1.0, baseline=0.25 * g) for g in range(2)]
    _, columns = estimate(batch, config, 0.0)
    assert advantages(columns) == {"0-0": [1.0] * 2, "1-0": [0.75] * 2}


def test_an_estimator_gives_returns_if_and_only_if_it_needs_a_critic() -> None:
    batch = [RewardedSample(sample(0, i, values=[0.0, 0.0]), float(i)) for i in range(2)]
    with pytest.raises(ValueError, match="this one gave none"):
        estimate(batch, build({"algorithm": {"advantage": "gae"}}), 0.0, lambda batch, config: batch.values_N)
    with pytest.raises(ValueError, match="this one gave some"):
        estimate(batch, build({}), 0.0, lambda batch, config: Advantages(batch.rewards_S, batch.values_N))


def test_an_estimator_of_the_users_own_takes_the_place_of_the_configured_one() -> None:
    batch = [RewardedSample(sample(0, i), float(i)) for i in range(2)]
    _, columns = estimate(batch, build({}), 0.0, lambda batch, config: batch.rewards_S * 10)
    assert advantages(columns) == {"0-0": [0.0] * 2, "0-1": [10.0] * 2}
