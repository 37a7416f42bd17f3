"""The catalogue of metrics: every name, its unit, what it means and what it is divided by.

A metric that doesn't apply is absent, never 0; a mean is over what it applies to (a sum and a count over all ranks,
never a mean of means). `docs/metrics.md` is `markdown()`, and a test keeps it so:
`python -m rlhf.tracking.metrics > docs/metrics.md` writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `<...>` in the name stands for a phase, a role, a term or a reward function."""

    name: str
    unit: str
    meaning: str
    normalised: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric."""
        pattern = "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.name))
        return re.fullmatch(pattern, name) is not None


_OVER_TOKENS = "over the trained response tokens of all ranks"
_TOKENS = f"mean {_OVER_TOKENS}"
_UPDATES = "mean over the step's optimizer updates"
_USEFUL = "sum over all ranks and passes"
_SLOWEST = "those of the slowest rank"
_COMPUTED = "over the tokens that all ranks computed in one pass over the batch"
_SCORED = "over the step's samples that have a reward, those of filtered groups included"
_FINISHED = "over the step's samples that ended by `stop` or `length`"
_EVALUATED = "over the held-out problems that have a reward"

CATALOGUE: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "The weighted sum of the reward functions, which trains.", f"mean {_SCORED}"),
    Metric("reward/std", "reward", "Spread of that sum.", f"population standard deviation {_SCORED}"),
    Metric(
        "reward/<function>/mean",
        "reward",
        "What one reward function gave, before its weight.",
        "mean over the step's samples to which this function gave a number",
    ),
    Metric(
        "reward/<function>/<metric>",
        "as reported",
        "A figure that a reward function reports beside its score.",
        "mean over the samples for which it was reported",
    ),
    Metric(
        "reward/errors",
        "samples",
        "Samples whose reward failed, whatever `reward.on_error` made of them.",
        "count over the step's samples",
    ),
    Metric(
        "reward/shaped_mean",
        "reward",
        "The reward after `reward.shaping`; absent when nothing is shaped.",
        "mean over the samples that are trained on",
    ),
    Metric(
        "advantage/mean",
        "reward",
        "Advantages as the loss gets them.",
        _TOKENS,
    ),
    Metric("advantage/std", "reward", "Spread of the advantages.", f"population standard deviation, {_OVER_TOKENS}"),
    Metric("advantage/nonzero_fraction", "fraction", "Tokens from which something is learned.", _TOKENS),
    Metric(
        "advantage/kl_penalty_mean",
        "reward",
        "What KL in the reward takes off a response: coefficient times KL, summed over its tokens.",
        "mean over the samples that are trained on",
    ),
    Metric(
        "policy/loss",
        "nats",
        "The loss that was differentiated: policy loss, KL times its coefficient where KL is in the loss, and the "
        "entropy bonus.",
        "by `algorithm.aggregation`, one denominator per optimizer update; mean over the step's updates",
    ),
    Metric(
        "policy/update_kl",
        "nats",
        "How far the policy moved within the step: KL of the policy that sampled from the policy being updated (k3), "
        "before each update.",
        _TOKENS,
    ),
    Metric("policy/kl", "nats", "KL of the policy from the reference model, by `algorithm.kl.estimator`.", _TOKENS),
    Metric("policy/kl_coefficient", "1", "Factor of the KL term in this step, the controller's.", "none"),
    Metric(
        "policy/entropy",
        "nats",
        "Entropy of the policy's next-token distribution at the temperature, over the full vocabulary.",
        _TOKENS,
    ),
    Metric(
        "policy/grad_norm",
        "1",
        "Global norm of the gradient before it is clipped to `policy.max_grad_norm`.",
        _UPDATES,
    ),
    Metric(
        "policy/clip_fraction",
        "fraction",
        "Tokens whose ratio (or divergence, with dppo) left the trust region, so that clipping took effect.",
        _TOKENS,
    ),
    Metric(
        "policy/ratio_max",
        "1",
        "Largest ratio of a token's probability to that before the step's first update; 1 in a batch's only update.",
        f"maximum {_OVER_TOKENS}",
    ),
    Metric("policy/learning_rate", "1", "Learning rate of the step's last optimizer update.", "none"),
    Metric("rollout/tokens", "tokens", "Response tokens generated, those of aborted samples included.", "sum"),
    Metric(
        "rollout/tokens_per_second",
        "tokens/s",
        "Generation throughput of all engines together.",
        "`rollout/tokens` over the seconds in which the step's samples were generated",
    ),
    Metric("rollout/length_p50", "tokens", "Median response length.", f"{_FINISHED}, linear interpolation"),
    Metric("rollout/length_p99", "tokens", "99th percentile of the response length.", f"{_FINISHED}, linear"),
    Metric("rollout/length_max", "tokens", "Longest response.", f"maximum {_FINISHED}"),
    Metric("rollout/truncated_fraction", "fraction", "Responses cut at the token limit.", f"mean {_FINISHED}"),
    Metric(
        "rollout/groups_drawn",
        "groups",
        "Groups begun in the step, carried ones included; above `rollout.prompts_per_step` with over-generation or "
        "dynamic sampling.",
        "count",
    ),
    Metric(
        "rollout/groups_replaced",
        "groups",
        "Groups that dynamic sampling replaced, their rewards being equal.",
        "count",
    ),
    Metric(
        "rollout/live_<percent>",
        "samples",
        "Samples being generated (greedy baselines included) when so much of the time had passed: the tail, seen.",
        "count at that time; the time is from the step's first request to its last complete group",
    ),
    Metric(
        "rollout/tail_seconds",
        "s",
        "From the moment when 90 % of the answers were there to the last.",
        "over the answers, failures and aborts until the step's last group was complete",
    ),
    Metric(
        "rollout/idle_share_<engine>",
        "fraction",
        "Time in which an engine had nothing to generate while the step's groups were not complete.",
        "over the same time as `rollout/live_<percent>`; 1 for an engine that is lost",
    ),
    Metric("fleet/serving", "engines", "Engines that serve after the step's sync.", "count"),
    Metric(
        "fleet/lost",
        "engines",
        "Engines that died or were given up; one that came back and was lost again counts twice.",
        "total of the run so far",
    ),
    Metric("fleet/retries", "requests", "Requests sent again, since an engine failed them.", "total of the run so far"),
    Metric(
        "parity/max_abs",
        "nats",
        "Largest difference between an engine's and the trainer's log-prob of the same token and weights, before the "
        "step's first update.",
        "maximum over the trained response tokens of all ranks",
    ),
    Metric("parity/mean_abs", "nats", "The same difference, on average.", _TOKENS),
    Metric(
        "parity/kl",
        "nats",
        "Mismatch: KL of the distribution that engines sampled from from the trainer's before the first update (k3).",
        _TOKENS,
    ),
    Metric("correction/weight_mean", "1", "Importance weights of `algorithm.correction`.", _TOKENS),
    Metric(
        "correction/effective_sample_size",
        "fraction",
        "Share of the tokens that the weights leave effective: (sum w)^2 / (count x sum w^2); 1 when all are equal.",
        f"one figure {_OVER_TOKENS}",
    ),
    Metric("correction/kept_fraction", "fraction", "Tokens whose weight is above 0.", _TOKENS),
    Metric(
        "critic/loss",
        "reward^2",
        "Half the squared error of the values against the returns, clipped by `critic.value_clip`.",
        "mean over tokens, one denominator per optimizer update; mean over the step's updates",
    ),
    Metric("critic/value_mean", "reward", "Values before the update.", _TOKENS),
    Metric("critic/return_mean", "reward", "Returns, which the values are trained towards.", _TOKENS),
    Metric(
        "critic/explained_variance",
        "fraction",
        "1 - var(returns - values) / var(returns), of the values before the update; absent when all returns are equal.",
        f"one figure {_OVER_TOKENS}",
    ),
    Metric("critic/clip_fraction", "fraction", "Values that `critic.value_clip` held back.", _TOKENS),
    Metric("critic/grad_norm", "1", "As `policy/grad_norm`, of the critic.", _UPDATES),
    Metric("critic/learning_rate", "1", "As `policy/learning_rate`, of the critic.", "none"),
    Metric(
        "<learner>/useful_tokens_per_second",
        "tokens/s",
        "Useful tokens of an update: all responses, and each group's prompt once. Of policy and critic, as all that "
        "follows up to `<learner>/peak_bytes_<phase>`.",
        f"{_USEFUL} over the seconds of `forward_backward` and `optimizer`, {_SLOWEST}",
    ),
    Metric(
        "<learner>/padding_fraction",
        "fraction",
        "Tokens that were computed and belong to no sample.",
        _COMPUTED,
    ),
    Metric(
        "<learner>/duplicate_fraction",
        "fraction",
        "Tokens of prompts that were computed again: for a group in several micro-batches, or in padded rows.",
        _COMPUTED,
    ),
    Metric(
        "<learner>/flops_per_second",
        "FLOP/s",
        "Operations that the useful tokens need forward and backward: 6 a token and matrix parameter, and attention to "
        "the tokens that it sees (PaLM, appendix B; `rlhf/models/operations.py`). Recomputation is none of them.",
        f"{_USEFUL} over the seconds of `forward_backward`, {_SLOWEST}",
    ),
    Metric(
        "<learner>/mfu",
        "fraction",
        "Model FLOPs utilisation, forward and backward: `flops_per_second` over what the ranks reach in large matrix "
        "products of that dtype, measured once after the first update.",
        "sum over all ranks, above and below",
    ),
    Metric(
        "<learner>/mfu_with_optimizer",
        "fraction",
        "The same with the optimizer's time, in which nothing counts as done.",
        "sum over all ranks, above and below",
    ),
    Metric(
        "<learner>/peak_bytes_<phase>",
        "bytes",
        "Most memory that a rank held during `score`, `forward_backward` or `optimizer`: on CPU resident memory of its "
        "process, libraries included (absent where the kernel doesn't let its peak be lowered), on a GPU what torch "
        "allocated.",
        "maximum over the ranks",
    ),
    Metric(
        "weights/version",
        "steps",
        "Version that the engines serve after the step: the number of optimizer steps behind it.",
        "none",
    ),
    Metric("weights/bytes", "bytes", "Weights sent in the step's sync.", "sum over tensors, each counted once"),
    Metric("weights/seconds", "s", "Duration of the step's sync, from begin to the last commit.", "none"),
    Metric(
        "weights/paused_seconds",
        "s",
        "Time of the sync in which no engine generates: what it costs the engines.",
        "none",
    ),
    Metric(
        "weights/<part>_seconds",
        "s",
        "A part of the sync: `begin`, then on the policy gather, cast, checksum, wire, load, and the slowest engine's "
        "parts as `engine_<part>`. Parts overlap.",
        "sum over the sync's buckets",
    ),
    Metric(
        "eval/accuracy",
        "fraction",
        "Held-out problems whose reward is at least 1; written to `evaluations.jsonl`.",
        "over all held-out problems, failed ones included",
    ),
    Metric("eval/problems", "problems", "Held-out problems, each evaluated once.", "count"),
    Metric("eval/reward_mean", "reward", "As `reward/mean`, of the held-out problems.", _EVALUATED),
    Metric("eval/reward_std", "reward", "As `reward/std`, of the held-out problems.", _EVALUATED),
    Metric(
        "eval/reward_<function>_mean", "reward", "As `reward/<function>/mean`, of the held-out problems.", _EVALUATED
    ),
    Metric("time/step", "s", "The driver's wall clock of the step.", "none"),
    Metric(
        "time/<phase>",
        "s",
        "The driver's wall clock in one phase.",
        "sum over the phase's spans; an instant that several phases cover counts for the one that started first",
    ),
    Metric("time/other", "s", "`time/step` less all phases.", "none"),
    Metric(
        "busy/<role>",
        "s",
        "Time in which a process of this role was at work in the step; roles overlap.",
        "union of a process's spans, mean over the role's processes",
    ),
    Metric(
        "ledger/<term>",
        "samples",
        "`drawn` = `trained` + `filtered` + `failed` + `stale` + `discarded` + `buffered` + `in_flight`. Beside that, "
        "`redone` counts samples of finished steps that were lost with a killed process and done again.",
        "totals of the run so far; `buffered` and `in_flight` are stocks",
    ),
    Metric(
        "checkpoint/wait_seconds",
        "s",
        "How long the step waited for its checkpoint: for the save before it, and for the snapshot. Absent in steps "
        "without one.",
        "none",
    ),
    Metric(
        "checkpoint/held_seconds",
        "s",
        "How long optimizer steps waited for the copy of the last checkpoint; in the first step after it was written.",
        "maximum over the ranks",
    ),
    Metric("checkpoint/bytes", "bytes", "Size of the learners' snapshot.", "sum over all ranks"),
)


def lookup(name: str) -> Metric | None:
    """The catalogue's entry for a metric of `metrics.jsonl`; exact names go before patterns."""
    exact = [metric for metric in CATALOGUE if metric.name == name]
    return next(iter(exact + [metric for metric in CATALOGUE if metric.matches(name)]), None)


def markdown() -> str:
    """The text of `docs/metrics.md`."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.normalised} |" for m in CATALOGUE]
    return "\n".join([_INTRODUCTION, "| name | unit | meaning | normalised |", "| --- | --- | --- | --- |", *rows, ""])


_INTRODUCTION = """\
# Metrics

One line a step in `<run.dir>/<run.name>/metrics.jsonl`, with `step` (from 1) first; evaluations (`eval/...`) are in
`evaluations.jsonl`. The same names go to wandb and TensorBoard. This page is generated from `rlhf/tracking/metrics.py`.

- A metric that doesn't apply is absent, never 0: without a reference model there is no `policy/kl`.
- A value that isn't a number (NaN, infinity) is `null`, and the log names the metric once.
- A mean over tokens or samples is a sum divided by a count, both over all ranks: neither padding nor a rank that has
  nothing to count changes it.
- Times come from spans (`spans.jsonl`). Phases and `time/other` add up to `time/step`; `busy/<role>` may overlap.
"""


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/...` of a step's samples; a sample without a reward counts nowhere, and is in the ledger."""
    metrics: dict[str, float] = {}
    rewards = _numbers(trajectory.reward for trajectory in trajectories)
    if rewards:
        metrics |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    for function in dict.fromkeys(name for trajectory in trajectories for name in trajectory.rewards_by_function):
        given = _numbers(trajectory.rewards_by_function.get(function) for trajectory in trajectories)
        if given:
            metrics[f"reward/{function}/mean"] = float(np.mean(given))
    return metrics


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """`rollout/...` of a step's samples, generated in `seconds` of wall clock."""
    tokens = sum(trajectory.response_tokens for trajectory in trajectories)
    metrics: dict[str, float] = {"rollout/tokens": tokens}
    if seconds > 0:
        metrics["rollout/tokens_per_second"] = tokens / seconds
    finished = [trajectory for trajectory in trajectories if trajectory.finish_reason != "aborted"]
    if finished:
        lengths = [trajectory.response_tokens for trajectory in finished]
        p50, p99 = np.percentile(lengths, [50, 99])
        truncated = sum(trajectory.finish_reason == "length" for trajectory in finished)
        metrics |= {
            "rollout/length_p50": float(p50),
            "rollout/length_p99": float(p99),
            "rollout/length_max": max(lengths),
            "rollout/truncated_fraction": truncated / len(finished),
        }
    return metrics


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


if __name__ == "__main__":
    sys.stdout.write(markdown())
