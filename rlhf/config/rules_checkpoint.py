"""Rules about checkpoints and about where a run begins, and what their paths point to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rlhf.config.problems import Problem
from rlhf.config.rules_common import Rule, problem, unused
from rlhf.config.schema import CheckpointConfig, Config
from rlhf.config.suggest import nearest

# What a checkpoint can be judged by: names of the metrics' catalogue that say how good a policy is, and not how fast
# the step was. `<function>` is a reward function's name.
JUDGES = (
    "eval/accuracy",
    "eval/reward_mean",
    "eval/reward_std",
    "eval/reward_<function>_mean",
    "reward/mean",
    "reward/std",
    "reward/<function>/mean",
    "reward/shaped_mean",
    "policy/kl",
    "policy/entropy",
    "policy/loss",
    "critic/loss",
    "critic/explained_variance",
    "rollout/length_p50",
    "rollout/truncated_fraction",
)
_MANIFEST = "manifest.json"
_WORDS = ("auto", "must", "never")


def checkpoint_settings_have_checkpoints(config: Config) -> Iterator[Problem]:
    """`checkpoint.keep`, `keep_best` and `on_failed_save` need `checkpoint.every` above 0."""
    if config.checkpoint.every == 0:
        yield from unused(
            config,
            [f"checkpoint.{key}" for key in ("keep", "keep_best", "on_failed_save")],
            "while checkpoint.every is 0: no checkpoint is written",
            "Set the number of steps between checkpoints, or leave it out",
        )


def resuming_has_checkpoints(config: Config) -> Iterator[Problem]:
    """`run.if_exists: resume` needs `checkpoint.every` above 0, and not `checkpoint.resume: never`.

    A run that writes no checkpoint would begin anew at each start; for that there is `replace`.
    """
    if config.run.if_exists != "resume":
        return
    if config.checkpoint.every == 0:
        yield problem(
            config,
            "run.if_exists",
            "there is nothing to resume from while checkpoint.every is 0: no checkpoint is written",
            "Set checkpoint.every to the number of steps between checkpoints, or run.if_exists: replace to start over",
        )
    if config.checkpoint.resume == "never":
        yield problem(
            config,
            "checkpoint.resume",
            "contradicts run.if_exists: resume, which goes on with the run that is there",
            "Use auto, or set run.if_exists: replace to start over",
        )


def must_resume_finds_the_run(config: Config) -> Iterator[Problem]:
    """`checkpoint.resume: must` needs `run.if_exists: resume`: a new or emptied folder has no checkpoint."""
    if config.checkpoint.resume == "must" and config.run.if_exists != "resume":
        yield problem(
            config,
            "checkpoint.resume",
            f"there is never a checkpoint in the run folder with run.if_exists: {config.run.if_exists}",
            "Set run.if_exists: resume, or give the path of a checkpoint",
        )


def resume_word_is_spelt_right(config: Config) -> Iterator[Problem]:
    """`checkpoint.resume` is `auto`, `must`, `never` or a path, and what resembles one of the words is not a path."""
    resume = config.checkpoint.resume
    if isinstance(resume, Path) and len(resume.parts) == 1:
        near = nearest(str(resume), _WORDS)
        if near is not None:
            yield Problem(
                "checkpoint.resume", "must be auto, must, never, or a path", str(resume), f"Did you mean {near}?"
            )


def a_run_has_one_beginning(config: Config) -> Iterator[Problem]:
    """`checkpoint.init_from` goes with `checkpoint.resume: auto` or `never` only.

    With auto, the run starts from those weights, and resumes from checkpoints of its own.
    """
    checkpoint = config.checkpoint
    if checkpoint.init_from is not None and (isinstance(checkpoint.resume, Path) or checkpoint.resume == "must"):
        yield Problem(
            "checkpoint.init_from",
            f"has no effect with checkpoint.resume: {checkpoint.resume}, which brings weights, optimizer and data "
            "position",
            str(checkpoint.init_from),
            "Leave one of them out",
        )


def best_is_judged_by_a_metric(config: Config) -> Iterator[Problem]:
    """`checkpoint.keep_best.metric` is a metric that tells how good a policy is, and that this run has.

    `eval/...` needs `evaluation.every` above 0 and `checkpoint.every` as a multiple of it, so that each checkpoint is
    judged.
    """
    best = config.checkpoint.keep_best
    if best is None or config.checkpoint.every == 0:
        return
    key = "checkpoint.keep_best.metric"
    if not any(_matches(judge, best.metric) for judge in JUDGES):
        near = nearest(best.metric, JUDGES)
        hint = f"Did you mean {near}?" if near else f"One of: {', '.join(JUDGES)}"
        yield problem(config, key, "is no metric that a checkpoint can be judged by", hint)
    elif best.metric.startswith("eval/"):
        evaluation, every = config.evaluation, config.checkpoint.every
        if evaluation is None:
            yield problem(
                config, key, "there is no evaluation in this run", "Set evaluation.prompts, or use reward/mean"
            )
        elif evaluation.every == 0 or every % evaluation.every:
            yield problem(
                config,
                key,
                f"a checkpoint every {every} steps is not judged by an evaluation every {evaluation.every}",
                f"Set evaluation.every to {every}, or to a divisor of it",
            )


def resolve_checkpoint_paths(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """The same section with absolute paths."""
    update: dict[str, Path] = {}
    if isinstance(checkpoint.resume, Path):
        update["resume"] = _absolute(checkpoint.resume)
    if checkpoint.init_from is not None:
        update["init_from"] = _absolute(checkpoint.init_from)
    return checkpoint.model_copy(update=update)


def checkpoint_files(config: Config) -> Iterator[Problem]:
    """`checkpoint.resume` and `checkpoint.init_from`, where they are paths, are folders of checkpoints."""
    for name in ("resume", "init_from"):
        path = getattr(config.checkpoint, name)
        if isinstance(path, Path) and not (_absolute(path) / _MANIFEST).is_file():
            what = f"has no {_MANIFEST}" if _absolute(path).is_dir() else "is no folder"
            yield Problem(
                f"checkpoint.{name}",
                f"{_absolute(path)} {what}: it is not a checkpoint",
                str(path),
                "Give the folder of one, such as runs/name/checkpoints/step-000010"
                + ("; a model's folder belongs in model.path" if name == "init_from" else ""),
            )


def _matches(judge: str, metric: str) -> bool:
    before, function, after = judge.partition("<function>")
    pattern = re.escape(before) + (".+" if function else "") + re.escape(after)
    return re.fullmatch(pattern, metric) is not None


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


CHECKPOINT_RULES: tuple[Rule, ...] = (
    checkpoint_settings_have_checkpoints,
    resuming_has_checkpoints,
    must_resume_finds_the_run,
    resume_word_is_spelt_right,
    a_run_has_one_beginning,
    best_is_judged_by_a_metric,
)
