"""Bytes that are still there after the power went: files and the folders that name them, synced (Linux).

When a function returns, what it names is on the disk. No ray and no torch here: whatever room writes files uses this.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and bring its contents to the disk; its name is there once `sync_folder` has synced the folder."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Replace a file: a reader finds the old contents or the new, also after the power went."""
    aside = path.with_name(f".{path.name}.new")
    try:
        write_synced(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: files that were made, renamed or removed in it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
