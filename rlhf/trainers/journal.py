"""What a run writes down: its folder, its logs, and what the trackers are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf.config import dump_config
from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder, explain_write
from rlhf.tracking.jsonlines import JsonLinesLog, MetricsLog, SpansLog
from rlhf.tracking.rewind import rewind
from rlhf.tracking.spans import Span, recorder
from rlhf.tracking.summary import summarise
from rlhf.tracking.trackers import RunStatus, Trackers, make_trackers


class Journal:
    """A context manager around the run: the trackers are finished with how the block ended."""

    def __init__(self, folder: RunFolder, trackers: Trackers, ranks: Mapping[str, int]) -> None:
        self.folder = folder
        self._trackers = trackers
        self._ranks = ranks
        self._open_logs()

    @staticmethod
    def open(config: Config) -> Journal:
        """Claim the run folder and write `config.yaml`. Raises `RunExists` when the name is taken."""
        folder = RunFolder.open(config.run)
        with explain_write(folder.config_yaml):
            folder.config_yaml.write_text(dump_config(config), encoding="utf-8")
        ranks = {
            "policy": config.policy.ranks,
            "critic": config.critic.ranks,
            "rollout": config.rollout.engines,
            "reference": config.reference.ranks,
            "reward_model": config.reward.model.ranks if config.reward.model is not None else 0,
        }
        trackers = make_trackers(config)
        trackers.start(config, folder)
        return Journal(folder, trackers, ranks)

    def rewind(self, step: int | None) -> Mapping[str, float]:
        """Take the run's files back to the end of `step`, None for its very beginning; each step is in them once.

        Returns the metrics of the last step that was written down before, cut off or not; empty when there was none.
        """
        self._close_logs()
        last = _last_line(self.folder.metrics_jsonl)
        rewind(self.folder, step)
        self._trackers.rewind(step)
        self._open_logs()
        return last

    def sync(self) -> None:
        """Bring what was written to the disk: a checkpoint counts on it."""
        for log in (self._metrics, self._spans, self._evaluations):
            log.sync()

    def _open_logs(self) -> None:
        self._metrics = MetricsLog(self.folder.metrics_jsonl)
        self._spans = SpansLog(self.folder.spans_jsonl)
        self._evaluations = JsonLinesLog(self.folder.evaluations_jsonl)

    def _close_logs(self) -> None:
        for log in (self._metrics, self._spans, self._evaluations):
            log.close()

    def note(self, message: str) -> None:
        """Show a line to the person who watches."""
        self._trackers.note(message)

    def step(self, step: int, metrics: Mapping[str, float], spans: Sequence[Span]) -> None:
        """Write down a finished step; `spans` are all that were recorded since the last one, its own included."""
        line = {**metrics, **summarise(spans, step, self._ranks)}
        self._spans.write(spans)
        self._metrics.write(step, line)
        self._trackers.log(line, step)

    def spans(self, spans: Sequence[Span]) -> None:
        """Write down spans that belong to no step."""
        self._spans.write(spans)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down an evaluation of the weights after `step` optimizer steps."""
        self._evaluations.append({"step": step, **metrics})
        self._trackers.log(metrics, step)
        self.note(
            f"evaluation after step {step}: accuracy {metrics['eval/accuracy']:.3f} "
            f"on {metrics['eval/problems']:.0f} held-out problems"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trackers.finish(_status(kind))
        # The spans of a step that failed say what it was doing.
        self._spans.write(recorder.drain())
        self._close_logs()
        self.folder.close()


def _last_line(path: Path) -> Mapping[str, float]:
    """The last whole line of a JSON Lines file; the very last may be torn by a kill."""
    last: Mapping[str, float] = {}
    for line in path.read_bytes().splitlines():
        try:
            last = json.loads(line)
        except ValueError:
            continue
    return last


def _status(kind: type[BaseException] | None) -> RunStatus:
    if kind is None:
        return "done"
    return "interrupted" if issubclass(kind, KeyboardInterrupt | asyncio.CancelledError) else "failed"
