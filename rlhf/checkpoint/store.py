"""The checkpoints of a run: `<run>/checkpoints/step-000010/`, one folder for all roles.

Invariants
- A checkpoint is complete or absent. It is written aside (`.writing-step-000010`), every file and folder is synced, the
  manifest is written last, and only then it is renamed to its name.
- `latest` moves after the rename, atomically, and names a complete checkpoint. Whatever is killed at whatever moment,
  it names the checkpoint before or the new one.
- Only after that older ones go: the `keep` newest stay, the best by `keep_best`, and what `latest` names. Both are told
  from the disk, so a restart changes nothing. Of equally good ones the newer is the best.
- Only our own is deleted: a checkpoint with a manifest that we can read, or what a dead process left half-written or
  half-removed. A damaged checkpoint that is in the way is renamed and stays.
- A commit that raises leaves the other checkpoints and `latest` as they were. What can't be removed afterwards is a
  warning, since the new checkpoint is safe.
- Nothing is handed out to be loaded before all its checksums were compared.

The run folder's lock keeps other processes away; several threads may use one store.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from rlhf.checkpoint import files
from rlhf.checkpoint.errors import CheckpointError, CorruptCheckpoint, NewerFormat, NoCheckpoint, explain_write
from rlhf.checkpoint.manifest import MANIFEST, Checkpoint, describe, parse, render
from rlhf.cluster import disk
from rlhf.config.schema import KeepBestConfig

Phase = Literal["written", "synced", "manifest", "renamed", "latest", "retained"]
Say = Callable[[str], None]

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFT_OVER = re.compile(r"\.(?:writing|removing)-step-\d{6,}")
_log = logging.getLogger(__name__)


class CheckpointStore:
    """Writes, finds, checks and removes the checkpoints in `folder`.

    `phases` is called in the course of a commit, right after what each name says: where tests make it fail.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: KeepBestConfig | None = None,
        phases: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._phases = phases
        self._lock = threading.RLock()
        self._begun: set[int] = set()

    def clean(self) -> None:
        """Remove what a dead process left half-written or half-removed; what this store has begun stays."""
        with self._lock, explain_write(self.folder):
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                begun = path in {self._writing(step) for step in self._begun}
                if _LEFT_OVER.fullmatch(path.name) and not path.is_symlink() and not begun:
                    shutil.rmtree(path)
            (self.folder / f".{LATEST}.new").unlink(missing_ok=True)

    def begin(self, step: int) -> Path:
        """A new, empty folder for the parts of the checkpoint after `step`; `commit` or `abandon` ends it.

        Raises `CheckpointError` when that step is saved or being saved, or the folder can't be made.
        """
        writing, place = self._writing(step), self._place(step)
        with self._lock:
            if step in self._begun:
                raise CheckpointError(f"step {step} is being saved already: commit or abandon it first")
            if any(checkpoint.path == place for checkpoint in self.checkpoints()):
                raise CheckpointError(f"step {step} is saved already in {place}: each step is saved once")
            with explain_write(writing):
                self.folder.mkdir(parents=True, exist_ok=True)
                if writing.exists():
                    shutil.rmtree(writing)
                writing.mkdir()
            self._begun.add(step)
        return writing

    def abandon(self, step: int) -> None:
        """Give up what was begun for `step`, if anything was, and remove it as far as the disk allows."""
        with self._lock:
            self._begun.discard(step)
            writing = self._writing(step)
            try:
                if writing.exists():
                    shutil.rmtree(writing)
            except OSError as error:
                # A run that may train on without this checkpoint must not end by its remains; `clean` removes them.
                _log.warning("%s could not be removed: %s", writing, error)

    def commit(
        self,
        step: int,
        *,
        weight_version: int,
        config: Mapping[str, object],
        versions: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> Checkpoint:
        """Make what was begun for `step` the run's latest checkpoint, then let old ones go; blocks while it syncs.

        `metrics` are what `keep_best` judges by. Raises `CheckpointError` with path and remedy when the disk is full or
        can't be written to; what was begun is then gone.
        """
        with self._lock:
            if step not in self._begun:
                raise CheckpointError(f"step {step} was not begun, so there is nothing to commit")
            try:
                with explain_write(self._place(step)):
                    self._phases("written")
                    sealed = files.seal(self._writing(step))
                    self._phases("synced")
                    checkpoint = describe(
                        self._place(step),
                        step,
                        weight_version=weight_version,
                        config=config,
                        versions=versions,
                        metrics=metrics,
                        files=sealed,
                    )
                    self._publish(checkpoint)
            except BaseException:
                shutil.rmtree(self._writing(step), ignore_errors=True)
                raise
            finally:
                self._begun.discard(step)
            self._phases("latest")
            self._retain()
            self._phases("retained")
            return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """The complete ones, oldest first: manifest, names and sizes are right; contents are for `verify`."""
        return [checkpoint for checkpoint in self._ours() if _is_whole(checkpoint)]

    def latest(self, say: Say = _log.warning) -> Checkpoint | None:
        """The one that `latest` names, else the newest complete one, which it says; None when there is none."""
        complete = self.checkpoints()
        name = self._named_latest()
        for checkpoint in complete:
            if checkpoint.path.name == name:
                return checkpoint
        if complete:
            reason = "is missing" if name is None else f"names {name}, which is not a complete checkpoint"
            say(f"{self.folder / LATEST} {reason}; the newest complete checkpoint is {complete[-1].path.name}")
        return complete[-1] if complete else None

    def verify(self, checkpoint: Checkpoint) -> None:
        """Raise `CorruptCheckpoint`, with every file that is wrong, unless all checksums match; reads every byte."""
        files.check_contents(checkpoint)

    def choose(self, resume: Literal["auto", "must"] | Path, say: Say) -> Checkpoint | None:
        """The checkpoint to resume from, its checksums compared.

        auto: the latest, else the newest good one, which it says; None only where no checkpoint is. must: the same, and
        `NoCheckpoint` where none is. Both raise it, with every reason, when there are some and none can be loaded. A
        path in this folder means that very checkpoint. A path elsewhere is where a run begins: once the run has
        checkpoints of its own, those go on. Raises `NewerFormat` rather than going back behind a later version's work.
        """
        if isinstance(resume, Path):
            if resume.resolve().parent == self.folder.resolve():
                return self.at(self.folder / resume.name)
            own = self._newest_good(say)
            if own is None:
                return self.at(resume)
            say(f"checkpoint.resume {resume} is where this run began; it goes on from its own {own.path.name}")
            return own
        chosen = self._newest_good(say)
        if chosen is None and resume == "must":
            raise NoCheckpoint(
                f"checkpoint.resume is must, and there is no checkpoint in {self.folder}; "
                "check run.dir and run.name, or set checkpoint.resume=auto to begin at step 1"
            )
        return chosen

    def at(self, path: Path, setting: str = "checkpoint.resume") -> Checkpoint:
        """The checkpoint in a folder that the user named by `setting`, its checksums compared.

        Raises `NoCheckpoint` when it is none, `CorruptCheckpoint` or `NewerFormat` when it can't be loaded.
        """
        if not (path / MANIFEST).is_file():
            found = sorted(inner.parent.name for inner in path.glob(f"**/step-*/{MANIFEST}")) if path.is_dir() else []
            near = f"; in it there are {', '.join(found)}" if found else ""
            raise NoCheckpoint(
                f"{setting} {path} is not a checkpoint: it has no {MANIFEST}{near}. "
                "Give the folder of one, such as runs/name/checkpoints/step-000010"
            )
        checkpoint = self._read(path)
        self.verify(checkpoint)
        return checkpoint

    def rewind(self, to: Checkpoint | None) -> None:
        """After a resume from `to`: it is the latest, and those of later steps, whose work is redone, are removed.

        With None, where the run begins anew, all of ours are. What is removed was not loaded: abandoned or damaged.
        """
        with self._lock, explain_write(self.folder):
            if to is None:
                (self.folder / LATEST).unlink(missing_ok=True)
            elif to.path.parent == self.folder and self._named_latest() != to.path.name:
                self._point_to(to)
            for checkpoint in self._ours():
                if to is None or checkpoint.step > to.step:
                    self._remove(checkpoint)

    def _publish(self, checkpoint: Checkpoint) -> None:
        """Manifest, rename, `latest`: from here on it exists."""
        writing = self._writing(checkpoint.step)
        disk.write_synced(writing / MANIFEST, render(checkpoint))
        disk.sync_folder(writing)
        self._phases("manifest")
        if checkpoint.path.exists():
            self._set_aside(checkpoint.path)
        writing.rename(checkpoint.path)
        try:
            disk.sync_folder(self.folder)
            self._phases("renamed")
            self._point_to(checkpoint)
        except BaseException:
            if self._named_latest() != checkpoint.path.name:
                self._remove_or_warn(checkpoint)
            raise

    def _point_to(self, checkpoint: Checkpoint) -> None:
        disk.replace_synced(self.folder / LATEST, f"{checkpoint.path.name}\n".encode())

    def _retain(self) -> None:
        """Remove what is not to be kept."""
        complete = self.checkpoints()
        stay = {checkpoint.step for checkpoint in complete[-self._keep :]}
        stay |= {checkpoint.step for checkpoint in complete if checkpoint.path.name == self._named_latest()}
        best = self._best(complete)
        if best is not None:
            stay.add(best.step)
        for checkpoint in self._ours():
            if checkpoint.step not in stay:
                self._remove_or_warn(checkpoint)

    def _best(self, complete: list[Checkpoint]) -> Checkpoint | None:
        """The best of those that have the metric."""
        if self._keep_best is None:
            return None
        metric, sign = self._keep_best.metric, 1 if self._keep_best.mode == "max" else -1
        judged = [checkpoint for checkpoint in complete if metric in checkpoint.metrics]
        return max(judged, key=lambda checkpoint: (sign * checkpoint.metrics[metric], checkpoint.step), default=None)

    def _newest_good(self, say: Say) -> Checkpoint | None:
        """The first whose contents are right, of the one that `latest` names and then from new to old."""
        reasons: list[str] = []
        steps = sorted(self._steps(), reverse=True)
        name = self._named_latest()
        for step in sorted(steps, key=lambda step: self._place(step).name != name):
            try:
                checkpoint = self._read(self._place(step))
                self.verify(checkpoint)
            except CorruptCheckpoint as error:
                reasons.append(str(error))
                continue
            if reasons:
                say(f"{'; '.join(reasons)}. Falls back to {checkpoint.path.name}")
            elif checkpoint.path.name != name:
                say(f"{self.folder / LATEST} names no checkpoint; the newest is {checkpoint.path.name}")
            elif step < steps[0]:
                say(f"{self._place(steps[0]).name} was not committed when the run ended; goes on from {name}")
            return checkpoint
        if reasons:
            raise NoCheckpoint(
                f"none of the checkpoints in {self.folder} can be loaded: {'; '.join(reasons)}. Restore one from a "
                "copy, or set run.if_exists=replace to begin at step 1"
            )
        return None

    def _ours(self) -> list[Checkpoint]:
        """Those with a manifest that we can read and that lie under their own step's name, oldest first."""
        found = []
        for step in sorted(self._steps()):
            try:
                found.append(self._read(self._place(step)))
            except (CorruptCheckpoint, NewerFormat):
                continue
        return found

    def _steps(self) -> list[int]:
        """Steps for which there is a folder with a checkpoint's name."""
        try:
            names = [path.name for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.folder}: {error.strerror}; make it a folder that can be read"
            ) from error
        steps = [int(match[1]) for match in map(_COMPLETE.fullmatch, names) if match]
        return [step for step in steps if self._place(step).name in names]

    def _read(self, path: Path) -> Checkpoint:
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise CorruptCheckpoint(path, [f"{MANIFEST} can't be read: {error.strerror}"]) from error
        checkpoint = parse(path, text)
        if path.parent == self.folder and path != self._place(checkpoint.step):
            raise CorruptCheckpoint(path, [f"{MANIFEST} belongs to step {checkpoint.step}"])
        return checkpoint

    def _named_latest(self) -> str | None:
        """The name in `latest`, which is only ever compared with names that are there; None where it says nothing."""
        try:
            return (self.folder / LATEST).read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def _set_aside(self, place: Path) -> None:
        """Rename what is in the way of a new checkpoint: a damaged one, or something that isn't ours."""
        aside = place.with_name(f"{place.name}.damaged")
        number = 1
        while aside.exists():
            number += 1
            aside = place.with_name(f"{place.name}.damaged-{number}")
        os.rename(place, aside)
        _log.warning("%s was not a complete checkpoint; it is %s now, and yours to remove", place, aside.name)

    def _remove(self, checkpoint: Checkpoint) -> None:
        files.remove_tree(checkpoint.path, self.folder / f".removing-step-{checkpoint.step:06d}")

    def _remove_or_warn(self, checkpoint: Checkpoint) -> None:
        try:
            self._remove(checkpoint)
        except OSError as error:
            _log.warning("%s is not kept, and could not be removed: %s", checkpoint.path, error)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _writing(self, step: int) -> Path:
        return self.folder / f".writing-step-{step:06d}"


def _is_whole(checkpoint: Checkpoint) -> bool:
    try:
        return not files.short(checkpoint)
    except OSError:
        return False
