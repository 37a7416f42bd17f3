"""Progress for the person who watches: a bar on a terminal, one plain line a step anywhere else.

The bar's time left is our own estimate, from the last steps' `time/step`, so that both modes say the same.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.trackers import RunStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# The median over these many steps follows a change of pace (longer responses) and ignores a slow step.
RECENT_STEPS = 10


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m05s` or `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def headline(metrics: Mapping[str, float]) -> list[str]:
    """The figures that are shown of a step; one that doesn't apply is left out."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "policy/kl" in metrics:
        parts.append(f"kl {metrics['policy/kl']:.4f}")
    if "rollout/tokens_per_second" in metrics:
        parts.append(f"{metrics['rollout/tokens_per_second']:.0f} tok/s")
    if "time/step" in metrics:
        parts.append(f"{metrics['time/step']:.1f} s/step")
    return parts


class ConsoleTracker:
    """Shows the run. `stream` is stdout unless given; `console` (rich) forces the bar on that console."""

    name = "console"

    def __init__(self, stream: TextIO | None = None, console: Console | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._console = console if console is not None else _terminal(self._stream)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._done: set[int] = set()
        self._seconds = 0.0
        self._tokens = 0.0
        self._folder = ""

    @property
    def is_bar(self) -> bool:
        """Whether the run is shown as a bar."""
        return self._console is not None

    def start(self, config: Config, folder: RunFolder) -> None:
        """Say what runs and where its files go; on a terminal, open the bar."""
        self._steps, self._folder = config.run.steps, str(folder.path)
        for line in start_block(config, folder):
            self.note(line)
        if self._console is not None:
            self._progress, self._task = _bar(self._console, self._steps)
            self._progress.start()

    def rewind(self, step: int | None) -> None:
        """Forget later steps, but not their time; lines that were shown stay, since they say what happened."""
        kept = step or 0
        self._done = {done for done in self._done if done <= kept}
        if self._first is not None and self._first[0] > kept:
            self._first = None
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=kept)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show a finished step; an evaluation's metrics, which have no `time/step`, are left to `note`."""
        if "time/step" not in metrics:
            return
        self._remember(metrics, step)
        parts = headline(metrics)
        if step < self._steps:
            parts.append(f"{duration(statistics.median(self._recent) * (self._steps - step))} left")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, figures=" · ".join(parts))
        else:
            self.note(" | ".join([f"step {step}/{self._steps}", *parts]))

    def note(self, message: str) -> None:
        """Show a message: above the bar, or as a line. May be called before `start` and after `finish`."""
        if self._console is not None:
            # Brackets in a message are text and not markup, and long lines are the terminal's to wrap.
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(message + "\n")
            self._stream.flush()

    def finish(self, status: RunStatus) -> None:
        """Close the bar and sum up the run."""
        if self._progress is not None:
            self._progress.stop()
        self.note(f"{status}: {len(self._done)} of {self._steps} steps in {duration(self._seconds)}")
        if self._first is not None and self._last is not None:
            (first, before), (last, after) = self._first, self._last
            self.note(f"  reward  {before:.3f} at step {first}, {after:.3f} at step {last}")
        if self._tokens:
            self.note(f"  tokens  {self._tokens:,.0f} generated")
        self.note(f"  files   {self._folder}")

    def _remember(self, metrics: Mapping[str, float], step: int) -> None:
        self._done.add(step)
        self._tokens += metrics.get("rollout/tokens", 0.0)
        self._recent.append(metrics["time/step"])
        self._seconds += metrics["time/step"]
        if "reward/mean" in metrics:
            self._last = (step, metrics["reward/mean"])
            self._first = self._first or self._last


def start_block(config: Config, folder: RunFolder) -> list[str]:
    """What runs, in a few lines."""
    rollout, algorithm = config.rollout, config.algorithm
    return [
        f"run {config.run.name}: {config.run.steps} steps, seed {config.run.seed}",
        f"  model   {config.model.path} ({config.model.dtype})",
        f"  train   {algorithm.advantage} advantages, {algorithm.loss} loss, "
        f"learning rate {config.policy.learning_rate:g}",
        f"  batch   {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples, "
        f"up to {rollout.max_new_tokens} new tokens",
        f"  files   {folder.path}",
    ]


def _terminal(stream: TextIO) -> Console | None:
    """A rich console when the stream is a terminal that can redraw a line."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream)
    return None if console.is_dumb_terminal else console


def _bar(console: Console, steps: int) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}", markup=False),
        console=console,
        refresh_per_second=2,  # the figures change once a step
    )
    return progress, progress.add_task("step", total=steps, figures="starting")
