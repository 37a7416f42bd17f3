"""Checkpoints of a run, as the driver makes and uses them.

Invariants
- Everything stateful of the driver is registered in one place, `registry`, and is in every checkpoint.
- A checkpoint is of a step boundary, after the sync: the snapshot is taken between two steps, and only then does the
  next begin. Its files are written and committed behind it; a second save waits for the first.
- A failed save is told, and ends the run or not by `checkpoint.on_failed_save`; the checkpoint before it stays.
- Frozen models are in it by fingerprint, and a resume with others is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.checkpoint import (
    DRIVER_STATE,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Fingerprint,
    StateError,
    StateRegistry,
    breaking,
    compare,
    differences,
    explain,
    fingerprint,
)
from rlhf.checkpoint.manifest import MANIFEST, plain_config
from rlhf.cluster.preflight import Refused
from rlhf.config import dump_config
from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.spans import now, span
from rlhf.trainers.roles import Roles
from rlhf.trainers.versions import installed_versions


class Checkpointer:
    """Saves and restores one run. `registry` takes what the driver has to remember."""

    def __init__(self, config: Config, store: CheckpointStore, roles: Roles, say: Callable[[str], None]) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._store = store
        self._roles = roles
        self._say = say
        self._pending: tuple[int, dict[str, float]] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._saved = 0
        self._held: float | None = None
        self.registry = StateRegistry()
        self.registry.register("models", FrozenModels(config))

    def due(self, step: int) -> bool:
        """Every `checkpoint.every` steps, and after the last; never with 0."""
        every = self._settings.every
        return every > 0 and (step % every == 0 or step == self._config.run.steps)

    async def snapshot(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the snapshot after `step`, where it is due; `metrics` are what `keep_best` judges by.

        Returns `checkpoint/...` of the step. `write_behind` has to follow.
        """
        held, self._held = self._held, None
        figures = {} if held is None else {"checkpoint/held_seconds": held}
        if not self.due(step) or step == self._saved:
            return figures
        started = now()
        with span("checkpoint", step):
            await self.finish()
            try:
                folder = self._store.begin(step)
                self.registry.save(folder / DRIVER_STATE)
                reports = await self._roles.save(folder)
            except (CheckpointError, OSError) as error:
                self._failed(step, error)
                return figures
        self._pending = (step, dict(metrics))
        size = float(sum(report.bytes for report in reports))
        return {**figures, "checkpoint/wait_seconds": now() - started, "checkpoint/bytes": size}

    def write_behind(self) -> None:
        """Let what was snapshot be written and committed while the run goes on."""
        if self._writing is not None and self._writing.done():
            self._writing.result()  # a failed save is told now, and not when the next one is due
        if self._pending is not None:
            step, metrics = self._pending
            self._pending = None
            self._writing = asyncio.ensure_future(self._write(step, metrics))

    async def finish(self) -> None:
        """Wait for the save under way."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def close(self) -> None:
        """Give up a save that isn't committed yet; what is committed stays."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            written = await self._roles.finish_save(self._settings.deadline_s)
            self._held = max(report.waited for report in written)
            await asyncio.to_thread(
                self._store.commit,
                step,
                weight_version=step,
                config=yaml.safe_load(dump_config(self._config)),
                versions=installed_versions(),
                metrics=metrics,
            )
            self._saved = step
        except asyncio.CancelledError:
            # Waits for a commit that is under way in its thread, and then finds nothing to give up.
            self._store.abandon(step)
            raise
        except Exception as error:  # whatever a disk, a learner's writer or a network file system comes up with
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        self._store.abandon(step)
        if self._settings.on_failed_save == "raise":
            raise error
        self._say(f"warning: the checkpoint of step {step} could not be saved, and the run goes on: {error}")

    def rewind(self, begin: Checkpoint | None) -> None:
        """Remove the run's checkpoints of steps that will be done again."""
        self._store.rewind(begin)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Give the driver and the learners the state of a checkpoint, whose checksums `choose` has compared."""
        with span("restore"):
            self.registry.load(checkpoint.path / DRIVER_STATE)
            loaded = await self._roles.load(checkpoint.path, self._settings.on_world_size_change)
        # A critic has also counted the batches of its warm-up.
        due = {"policy": checkpoint.step, "critic": self._config.critic.warmup_batches + checkpoint.step}
        for role, reports in loaded.items():
            for report in reports:
                if report.version != due[role]:
                    raise StateError(
                        f"{checkpoint.path}: the {role} has done {report.version} updates where {due[role]} are due"
                    )
        self._saved = checkpoint.step


class FrozenModels:
    """The models that a run reads and never changes, by fingerprint."""

    def __init__(self, config: Config) -> None:
        self._paths = {"model": config.model.path}
        if config.reward.model is not None:
            self._paths["reward.model"] = config.reward.model.path
        self._prints: dict[str, Fingerprint] = {}

    def state_dict(self) -> dict[str, Any]:
        """Each model's fingerprint; taken once, since that is what frozen means."""
        if not self._prints:
            self._prints = {key: fingerprint(path) for key, path in self._paths.items()}
        return {key: found.as_dict() for key, found in self._prints.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `StateError` unless the models are the same."""
        self.state_dict()
        problems = [
            f"{key}: {problem}"
            for key, found in self._prints.items()
            for problem in compare(Fingerprint.from_dict(state[key]), found)
        ]
        if problems:
            raise StateError(
                f"a frozen model is not what it was when the checkpoint was written: {'; '.join(problems)}. "
                "Give the model of then, or start a new run"
            )


def open_store(config: Config) -> CheckpointStore:
    """The store in the run's folder, which need not be there yet."""
    folder, settings = RunFolder.place(config.run), config.checkpoint
    return CheckpointStore(folder.checkpoints, keep=settings.keep, keep_best=settings.keep_best)


def choose_checkpoint(config: Config, store: CheckpointStore, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that the run goes on from, its contents verified; None where it begins at step 1.

    What differs from the configuration of then is said. Raises `Refused` when that would make another run of it, and
    when a checkpoint that is there, or has to be, can't be loaded.
    """
    resume = config.checkpoint.resume
    if resume == "never" or (config.run.if_exists != "resume" and not isinstance(resume, Path)):
        return None
    try:
        checkpoint = store.choose(resume, say)
    except CheckpointError as error:
        raise Refused(str(error)) from error
    if checkpoint is None:
        return None
    changes = differences(checkpoint.config, plain_config(yaml.safe_load(dump_config(config))))
    # How a run is to be resumed differs between its first start and its second, and says nothing.
    changes = [change for change in changes if change.key not in ("run.if_exists", "checkpoint.resume")]
    if breaking(changes):
        listed = "\n".join(explain(changes))
        raise Refused(f"{checkpoint.path} belongs to a run with another meaning:\n{listed}")
    for line in explain(changes):
        say(f"since {checkpoint.path.name}: {line.strip()}")
    return checkpoint


def check_initial_weights(config: Config) -> None:
    """Verify the checkpoint that `checkpoint.init_from` names, before anything unpickles it; raises `Refused`.

    One of a run with adapters has no weights but theirs.
    """
    start = config.checkpoint.init_from
    if start is None:
        return
    try:
        found = CheckpointStore(start.parent, keep=1).at(start, "checkpoint.init_from")
    except CheckpointError as error:
        raise Refused(str(error)) from error
    if found.config.get("policy", {}).get("lora") is not None:
        raise Refused(
            f"checkpoint.init_from = {start}: it is of a run with policy.lora and has no weights to start "
            "from. Give the export of that run as model.path"
        )


def is_finished(config: Config, checkpoint: Checkpoint | None, export: Path) -> bool:
    """Whether nothing is left to do: the last step is saved, and the model was exported after it."""
    if checkpoint is None or checkpoint.step < config.run.steps or not export.is_dir():
        return False
    return export.stat().st_mtime >= (checkpoint.path / MANIFEST).stat().st_mtime
