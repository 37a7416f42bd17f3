"""Where metrics go besides `metrics.jsonl`: one small protocol, and a composite that keeps failures apart.

A tracker is a convenience: when one fails it is reported once, switched off, and the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder

RunStatus = Literal["done", "failed", "interrupted"]

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that metrics go to. Any method may raise; `Trackers` handles it."""

    name: str

    def start(self, config: Config, folder: RunFolder) -> None:
        """The run begins; the tracker writes to disk inside `folder` only, and no secret."""

    def rewind(self, step: int | None) -> None:
        """The run goes on after `step`, None for its very beginning: later steps that were logged are done again.

        Comes before the first `log` and whenever roles are started again. The run folder's own files have been cut
        back by then. What the tracker shows afterwards has each step once.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of a finished step, or of an evaluation after it; between rewinds steps never decrease."""

    def finish(self, status: RunStatus) -> None:
        """The run has ended; called once, after which nothing else is."""


class Trackers:
    """All trackers of a run, each on its own: one that raises is reported once and switched off.

    `show` puts a line before the person who watches (`ConsoleTracker.note`); without it lines go to the log.
    """

    def __init__(self, trackers: Sequence[Tracker], show: Callable[[str], None] = _log.warning) -> None:
        self._active = list(trackers)
        self._show = show

    def start(self, config: Config, folder: RunFolder) -> None:
        """Start each tracker."""
        self._each("start", lambda tracker: tracker.start(config, folder))

    def rewind(self, step: int | None) -> None:
        """Take each tracker back to the end of `step`, None for the run's very beginning."""
        self._each("rewind", lambda tracker: tracker.rewind(step))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics of a step, or of an evaluation after it, to each tracker."""
        self._each("log", lambda tracker: tracker.log(metrics, step))

    def finish(self, status: RunStatus) -> None:
        """Finish each tracker; a second call does nothing."""
        self._each("finish", lambda tracker: tracker.finish(status))
        self._active = []

    def note(self, message: str) -> None:
        """Show a line to the person who watches."""
        try:
            self._show(message)
        except Exception:  # the terminal is gone: the run goes on, and the log has the line
            self._show = _log.warning
            _log.warning(message)

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                call(tracker)
            except Exception as error:
                self._active.remove(tracker)
                _log.debug("tracker %s failed in %s", tracker.name, what, exc_info=error)
                reason = f"{type(error).__name__}: {error}"
                self.note(f"tracker {tracker.name} failed in {what} and is off from now on: {reason}")


def make_trackers(config: Config) -> Trackers:
    """The trackers that the configuration asks for; the package that one needs is imported when it starts."""
    from rlhf.tracking.console import ConsoleTracker
    from rlhf.tracking.tensorboard_tracker import TensorBoardTracker
    from rlhf.tracking.wandb_tracker import WandbTracker

    trackers: list[Tracker] = []
    show: Callable[[str], None] = _log.warning
    if config.tracking.console:
        console = ConsoleTracker()
        trackers.append(console)
        show = console.note
    if config.tracking.tensorboard:
        trackers.append(TensorBoardTracker())
    if config.tracking.wandb.mode != "disabled":
        trackers.append(WandbTracker(show))
    return Trackers(trackers, show)
