"""Operating-system processes: who ends with whom, how one ended, what it left in its log (Linux).

No ray and no torch here: engine plugins, worker processes and the reaper use this module too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1

# `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT`, from <linux/pidfd.h>: any process that holds a pidfd may ask how the other
# one ended, once it is reaped. Since Linux 6.15. The struct's first 64 bytes end in the exit status.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_BYTES = 64
_POLL_S = 0.02


def die_with_parent(death_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `death_signal` to this process when its parent dies; at once if it has already died.

    The kernel means the parent's *thread* that started this process: start children from threads that live long.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, death_signal) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        # The parent died between the two calls, and no signal will come.
        os.kill(os.getpid(), death_signal)


def redirect_output(log: Path) -> bool:
    """Send this process's stdout and stderr (its children's too) to the end of `log`; false when it can't be opened.

    A fatal signal leaves the Python traceback of the thread that it came from there.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    faulthandler.enable(file=2, all_threads=False)  # all of them would push the program's own last lines out
    return True


def tail(log: Path, lines: int, limit_bytes: int = 16384) -> list[str]:
    """The last lines of a log; none when it can't be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class ExitWatch:
    """Remembers a process from while it lives, and tells how it ended. It needs not be a child of ours."""

    def __init__(self, pid: int) -> None:
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except OSError:
            self._pidfd = None

    def status(self, wait_s: float) -> int | None:
        """The wait status (see `describe_exit`); None if it can't be known within `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while self._pidfd is not None:
            info = bytearray(_PIDFD_INFO_BYTES)
            struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
            try:
                fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
            except OSError:
                return None  # an older kernel: it doesn't know the request, or keeps no status of reaped processes
            (mask,) = struct.unpack_from("Q", info, 0)
            if mask & _PIDFD_INFO_EXIT:
                (status,) = struct.unpack_from("i", info, _PIDFD_INFO_BYTES - 4)
                return int(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Let go of the process."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def exit_signal(status: int | None) -> int | None:
    """The signal in a wait status, if one ended the process."""
    return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None


def describe_exit(status: int | None) -> str:
    """A wait status in words that follow the process's name."""
    number = exit_signal(status)
    if number is not None:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "a signal"
        hint = " (kill -9, the kernel's out-of-memory killer, or a job manager)" if number == signal.SIGKILL else ""
        return f"was killed by {name}, signal {number}{hint}"
    if status is not None:
        return f"left with exit code {os.waitstatus_to_exitcode(status)}"
    return "is gone; no exit status was reported, which is what SIGKILL and the kernel's out-of-memory killer look like"


def trees(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all their descendants, as far as they live. Safe against reuse of a pid later."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    found: dict[int, psutil.Process] = {}
    pending = list(pids)
    while pending:
        pid = pending.pop()
        if pid in found:
            continue
        try:
            found[pid] = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
        pending.extend(children.get(pid, ()))
    return list(found.values())


def carriers(variable: str, value: str) -> list[psutil.Process]:
    """All processes that were started with this environment variable at this value, wherever they hang."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:  # another user's, or gone
            continue
    return found


def end(processes: Iterable[psutil.Process], grace_s: float) -> list[int]:
    """Wait `grace_s` for the processes to be gone, then SIGTERM, wait again, then SIGKILL; pids that had to be told."""
    alive = [process for process in processes if _alive(process)]
    told: list[int] = []
    for method in ("terminate", "kill"):
        alive = _wait_gone(alive, grace_s)
        for process in alive:
            told.append(process.pid)
            try:
                getattr(process, method)()
            except psutil.NoSuchProcess:
                continue
    _wait_gone(alive, grace_s)
    return sorted(set(told))


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _wait_gone(processes: list[psutil.Process], wait_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + wait_s
    alive = [process for process in processes if _alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        alive = [process for process in alive if _alive(process)]
    return alive
