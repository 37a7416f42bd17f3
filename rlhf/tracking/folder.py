"""The run folder: one folder a run, one run a folder.

Invariants
- A folder is claimed by one process at a time: it holds an exclusive lock on the folder's marker file until it ends,
  however it ends. Of two processes that race for a name one wins and the other is told.
- Nothing is deleted unless `run.if_exists=replace` and the folder is empty or a run's own; `resume` claims it as it is.
- The path is absolute from the start, so that it means the same to every process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import yaml

from rlhf.config.schema import RunConfig

# The marker is the lock file as well. It is there before `config.yaml`, so a run that died early can be replaced.
MARKER = ".rlhf-run"
# File systems without locks (some Lustre and FUSE mounts): the exclusive mkdir still decides who made the folder.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class RunFolderError(RuntimeError):
    """The run folder can't be made or written to. The message names path, reason and remedy."""


class RunExists(RunFolderError):
    """The run's name is taken."""


@contextmanager
def explain_write(path: Path) -> Iterator[None]:
    """Turn an operating system's error in the block into a `RunFolderError` that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(
            f"cannot write {path}: {reason}; free space or set run.dir to a folder that can be written to"
        ) from error


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<run.dir>/<run.name>/` and the names of what lies in it."""

    path: Path
    _lock: BinaryIO | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def place(run: RunConfig) -> RunFolder:
        """The folder of this run, unclaimed: to look at, whether it is there or not."""
        return RunFolder(run.dir.expanduser().resolve() / run.name)

    @staticmethod
    def check(run: RunConfig) -> None:
        """Raise what `open` would raise because of a folder that exists; changes nothing."""
        path = RunFolder.place(run).path
        if path.exists():
            _check_usable(path, run)

    @staticmethod
    def open(run: RunConfig) -> RunFolder:
        """Make and claim the folder of this run; a relative `run.dir` is relative to the current folder.

        With `run.if_exists=resume` an existing folder stays as it is. Raises `RunExists` when the name is taken (also
        by a process that runs now), `RunFolderError` when the folder can't be made, or is to be resumed or replaced
        and isn't a run's.
        """
        path = RunFolder.place(run).path
        with explain_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                _check_usable(path, run)
            folder = RunFolder(path, _claim(path))
            if run.if_exists != "resume":
                _empty(path)
            folder.logs.mkdir(exist_ok=True)
            folder.trajectories.mkdir(exist_ok=True)
        return folder

    def close(self) -> None:
        """Give up the claim; the end of the process does the same."""
        if self._lock is not None:
            self._lock.close()

    @property
    def config_yaml(self) -> Path:
        """The resolved configuration, secrets redacted."""
        return self.path / "config.yaml"

    @property
    def metrics_jsonl(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def spans_jsonl(self) -> Path:
        """One line a span."""
        return self.path / "spans.jsonl"

    @property
    def evaluations_jsonl(self) -> Path:
        """One line a held-out evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def trajectories(self) -> Path:
        """Folder of the samples, one Parquet file a step."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; whoever writes the first makes it."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder of the trained model; whoever exports makes it."""
        return self.path / "export"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"


def _check_usable(path: Path, run: RunConfig) -> None:
    """Raise unless this run may go on in the existing `path`, or empty it."""
    if run.if_exists == "refuse":
        raise RunExists(
            f"run.name {run.name!r}: {path} exists; choose another run.name, or set run.if_exists=resume to go on from "
            "its checkpoints, or run.if_exists=replace to delete it"
        )
    if not _is_run_folder(path):
        remedy = ", or remove it yourself" if run.if_exists == "replace" else ""
        raise RunFolderError(
            f"run.if_exists={run.if_exists}: {path} is not the folder of a run, so nothing was deleted or changed; "
            f"choose another run.name or run.dir{remedy}"
        )


def _is_run_folder(path: Path) -> bool:
    """Whether the folder is empty, holds our marker, or a `config.yaml` of a run of this very name."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}  # one look: another process may be claiming the folder just now
    if not names or MARKER in names:
        return True
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    run = config.get("run") if isinstance(config, dict) else None
    return isinstance(run, dict) and run.get("name") == path.name


def _claim(path: Path) -> BinaryIO:
    """Lock the folder's marker and return it; the lock lasts as long as the file is open, at most as the process."""
    lock = (path / MARKER).open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read(200).decode(errors="replace").strip() or "another process"
        lock.close()
        raise RunExists(
            f"run.name {path.name!r}: {path} is in use by {owner}; choose another run.name or wait for it"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    return lock


def _empty(path: Path) -> None:
    """Remove everything in a claimed folder but its marker."""
    for entry in path.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
