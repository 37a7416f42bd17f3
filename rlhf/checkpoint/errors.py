"""What can go wrong with checkpoints. Every message names the path, what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, read or used."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is not what its manifest says; `problems` names each file and what is wrong with it."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        super().__init__(f"{path} is damaged: {'; '.join(problems)}")
        self.path = path
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[Path, tuple[str, ...]]]:
        # By its own arguments, since it travels from actor to driver.
        return type(self), (self.path, self.problems)


class NoCheckpoint(CheckpointError):
    """There is nothing to resume from."""


class NewerFormat(CheckpointError):
    """A checkpoint was written by a later version of this package."""


class StateError(CheckpointError):
    """A state can't be written exactly, or belongs to other objects than those that are there."""


@contextmanager
def explain_write(path: Path) -> Iterator[None]:
    """Turn an operating system's error in the block into a `CheckpointError` that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else path
        raise CheckpointError(
            f"cannot save {path}: {error.strerror or error} ({where}); free space or make the folder writable, "
            "lower checkpoint.keep, or set checkpoint.on_failed_save=continue to train on without this checkpoint"
        ) from error
