"""The catalogue of metrics and the metrics that come from trajectory headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.tracking.metrics import CATALOGUE, lookup, markdown, reward_metrics, rollout_metrics
from rlhf.trajectories import FinishReason, Ledger, Trajectory

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def sample(
    tokens: int = 4, finish: FinishReason = "stop", reward: float | None = None, **by_function: float | None
) -> Trajectory:
    header = Trajectory(
        prompt_id="p",
        group_id=0,
        sample_index=0,
        prompt_tokens=2,
        response_tokens=tokens,
        finish_reason=finish,
        weight_version=0,
        engine=0,
    )
    return header.with_reward(reward, by_function)


def test_documentation_is_the_catalogue() -> None:
    assert DOCS.read_text() == markdown(), "run: python -m rlhf.tracking.metrics > docs/metrics.md"


def test_names_are_unique_and_grouped() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all("/" in name for name in names)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/exact_match/mean", "reward/<function>/mean"),
        ("reward/rewards.py:score/mean", "reward/<function>/mean"),
        ("eval/reward_mean", "eval/reward_mean"),
        ("eval/reward_exact_match_mean", "eval/reward_<function>_mean"),
        ("time/step", "time/step"),
        ("time/other", "time/other"),
        ("time/rollout", "time/<phase>"),
        ("busy/policy", "busy/<role>"),
        ("ledger/trained", "ledger/<term>"),
        ("rollout/length_p99", "rollout/length_p99"),
    ],
)
def test_name_finds_its_entry(name: str, entry: str) -> None:
    metric = lookup(name)
    assert metric is not None and metric.name == entry


@pytest.mark.parametrize("name", ["reward", "reward/median", "time/", "policy/losss"])
def test_name_that_is_not_in_the_catalogue_finds_nothing(name: str) -> None:
    assert lookup(name) is None


def test_what_our_helpers_report_is_in_the_catalogue() -> None:
    samples = [sample(reward=1.0, match=1.0)]
    reported = {**rollout_metrics(samples, 1.0), **reward_metrics(samples), **Ledger().metrics()}
    assert [name for name in reported if lookup(name) is None] == []


def test_reward_mean_and_std_are_over_samples_that_have_a_reward() -> None:
    # 1, 3 and a failed one: mean (1 + 3) / 2 = 2, population std 1. With the failure as 0 they would be 4/3 and 1.25.
    metrics = reward_metrics([sample(reward=1.0), sample(reward=None), sample(reward=3.0)])
    assert metrics == {"reward/mean": 2.0, "reward/std": 1.0}


def test_function_mean_is_over_samples_it_gave_a_number_to() -> None:
    # a: (1 + 0) / 2; b gave one number, 4; c none at all: absent.
    metrics = reward_metrics([sample(reward=1.0, a=1.0, b=None, c=None), sample(reward=2.0, a=0.0, b=4.0, c=None)])
    assert metrics["reward/a/mean"] == 0.5
    assert metrics["reward/b/mean"] == 4.0
    assert "reward/c/mean" not in metrics


def test_rewards_that_do_not_apply_are_absent_and_not_zero() -> None:
    assert reward_metrics([]) == {}
    assert reward_metrics([sample(reward=None)]) == {}


def test_function_may_be_called_mean() -> None:
    metrics = reward_metrics([sample(reward=1.0, mean=5.0)])
    assert (metrics["reward/mean"], metrics["reward/mean/mean"]) == (1.0, 5.0)


def test_rollout_metrics() -> None:
    # Lengths 2, 4, 6, 24: 36 tokens in 4 s = 9/s. p50 = (4 + 6) / 2 = 5. p99: position 0.99 * 3 = 2.97, so
    # 6 + 0.97 * 18 = 23.46. One of four was cut.
    metrics = rollout_metrics([sample(2), sample(24, "length"), sample(4), sample(6)], seconds=4.0)
    assert metrics == {
        "rollout/tokens": 36,
        "rollout/tokens_per_second": 9.0,
        "rollout/length_p50": 5.0,
        "rollout/length_p99": pytest.approx(23.46),
        "rollout/length_max": 24,
        "rollout/truncated_fraction": 0.25,
    }


def test_aborted_samples_count_as_tokens_but_not_as_lengths() -> None:
    # The aborted 100 tokens were generated; its length is no length, and it was not cut by the limit.
    metrics = rollout_metrics([sample(4), sample(8, "length"), sample(100, "aborted")], seconds=1.0)
    assert metrics["rollout/tokens"] == 112
    assert metrics["rollout/length_max"] == 8
    assert metrics["rollout/truncated_fraction"] == 0.5


def test_rollout_without_samples_has_no_lengths_and_no_rate_without_time() -> None:
    assert rollout_metrics([], seconds=0.0) == {"rollout/tokens": 0}
