"""A checkpoint's files: synced, hashed, compared and removed, one folder at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhf.checkpoint.errors import CorruptCheckpoint
from rlhf.checkpoint.manifest import DIGEST_BYTES, MANIFEST, Checkpoint, FileEntry
from rlhf.cluster.disk import sync_folder

_BLOCK_BYTES = 4 << 20
# Hashing releases the interpreter's lock. More threads would only compete for the disk, and with learners for cores.
_THREADS = 4


def seal(folder: Path) -> dict[str, FileEntry]:
    """Bring every file and folder below `folder` to the disk, and return what is there.

    Each file is read back once, while the system still has it in memory. Raises `OSError`, also for links and devices:
    what they lead to would not be part of the checkpoint.
    """
    names = sorted(_listing(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = dict(zip(names, pool.map(lambda name: _entry(folder / name, sync=True), names), strict=True))
    # From the inside out, so that a folder is on the disk after what it names.
    for root, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(root))
    return entries


def short(checkpoint: Checkpoint) -> list[str]:
    """What is missing, surplus or of another size; a look at names and sizes, not at contents."""
    found = _listing(checkpoint.path)
    found.pop(MANIFEST, None)
    problems = [f"{name} is missing" for name in checkpoint.files.keys() - found.keys()]
    problems += [f"{name} is surplus: the manifest does not know it" for name in found.keys() - checkpoint.files.keys()]
    problems += [
        f"{name} has {size} bytes, should have {checkpoint.files[name].size}"
        for name, size in found.items()
        if name in checkpoint.files and size != checkpoint.files[name].size
    ]
    return sorted(problems)


def check_contents(checkpoint: Checkpoint) -> None:
    """Raise `CorruptCheckpoint` unless files, sizes and checksums are the manifest's; reads every byte."""
    try:
        problems = short(checkpoint)
        if not problems:
            names = sorted(checkpoint.files)
            with ThreadPoolExecutor(_THREADS) as pool:
                found = pool.map(lambda name: _entry(checkpoint.path / name, sync=False), names)
                problems = [
                    f"{name} has checksum {entry.checksum}, should have {checkpoint.files[name].checksum}"
                    for name, entry in zip(names, found, strict=True)
                    if entry.checksum != checkpoint.files[name].checksum
                ]
    except OSError as error:
        raise CorruptCheckpoint(checkpoint.path, [f"can't be read: {error.strerror} ({error.filename})"]) from error
    if problems:
        raise CorruptCheckpoint(checkpoint.path, problems)


def remove_tree(folder: Path, aside: Path) -> None:
    """Remove a folder, first renamed to `aside`: one that is removed halfway is not found under its name."""
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    shutil.rmtree(aside)


def _listing(folder: Path) -> dict[str, int]:
    """Size of every file below `folder`, by its path with slashes."""
    return {path.relative_to(folder).as_posix(): size for path, size in _walk(folder)}


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path))
        elif stat.S_ISREG(status.st_mode):
            yield Path(entry.path), status.st_size
        else:
            raise OSError(0, "neither a file nor a folder", entry.path)


def _entry(path: Path, *, sync: bool) -> FileEntry:
    """Size and checksum of a file; with `sync`, its contents are on the disk afterwards."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    size = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())
