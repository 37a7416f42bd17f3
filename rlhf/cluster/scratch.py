"""A run's temporary files: a folder that all its processes use, and shared memory, for which there can be no folder.

Libraries leave files behind when a process is killed: Ray its session, vLLM its sockets and shared memory.

Invariants
- A folder is removed only when it is a run's, and nobody uses it: each process that does has a shared lock on it until
  it ends.
- Shared memory is removed only when a process of ours had it mapped, when it wasn't there before the run, and when no
  process has it mapped any more.
- What was not removed, since the reaper was killed as well, goes at the next start on that machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

PREFIX = "rlhf-"
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".rlhf-scratch"
# Ray puts 64 bytes of its own behind the folder's 14, and a Unix socket's path has 107 at most.
_LONGEST_BASE = 107 - 64 - 14


def scratch_of(marker: str) -> Path:
    """The folder of the run with this marker, on the machine of the caller."""
    base = tempfile.gettempdir()
    return Path(base if len(base) <= _LONGEST_BASE else "/tmp") / f"{PREFIX}{marker[:8]}"


def hold(folder: Path) -> BinaryIO:
    """Make the folder, where it isn't there, and keep it from being removed until the returned file is closed."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = (folder / _LOCK).open("ab")
        except FileNotFoundError:
            continue  # removed in this moment, as the one below
        fcntl.flock(lock, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat((folder / _LOCK).stat(), os.fstat(lock.fileno())):
                return lock
        lock.close()


_held: list[BinaryIO] = []


def use(folder: Path) -> None:
    """Have this process and its children make their temporary files in `folder`, which it holds until it ends."""
    _held.append(hold(folder))
    _share_compiled(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _share_compiled(folder: Path) -> None:
    """Keep what torch compiles where the next run finds it: some seconds of g++ at an engine's first request.

    The variable is not enough, since precompiled headers go to the default place whatever it says.
    """
    try:
        name = f"torchinductor_{getpass.getuser()}"
    except (KeyError, OSError):
        name = f"torchinductor_uid_{os.getuid()}"
    cache = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/{name}"))
    # Without it there is only more to compile.
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(cache)


def remove(folder: Path) -> bool:
    """Remove the folder unless somebody uses it, or it is no run's; whether it is gone."""
    try:
        with (folder / _LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        return not folder.exists()
    except OSError:
        return False
    return not folder.exists()


def sweep() -> None:
    """Remove the folders of runs that ended without a reaper."""
    for folder in scratch_of("").parent.glob(f"{PREFIX}????????"):
        with contextlib.suppress(FileNotFoundError):
            if folder.is_dir() and folder.stat().st_uid == os.geteuid():
                remove(folder)


class SharedMemory:
    """The shared memory that processes of a run have mapped. Watch it from the run's start."""

    def __init__(self) -> None:
        self._seen = _names()
        self._ours: set[str] = set()

    def unknown(self) -> set[str]:
        """What has come since the last look."""
        return _names() - self._seen

    def look(self, names: set[str], processes: Iterable[psutil.Process]) -> None:
        """Find out which of the names, of `unknown`, are mapped by these processes; take `processes` after `names`."""
        if names:
            self._ours |= {name for process in processes for name in _mapped(process.pid) if name in names}
        self._seen |= names

    def remove(self) -> None:
        """Remove what was mapped by them and is mapped by nobody now."""
        left = self._ours & _names()
        for pid in psutil.pids() if left else ():
            left.difference_update(_mapped(pid))
        for name in left:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def _names() -> set[str]:
    try:
        return set(os.listdir(SHARED_MEMORY))
    except OSError:
        return set()


def _mapped(pid: int) -> Iterator[str]:
    """Names in shared memory that a process has mapped; none when it is gone or another user's."""
    start = f"{SHARED_MEMORY}/"
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return
    for line in maps.splitlines():
        _, found, name = line.partition(start)
        if found:
            yield name
