"""A small process that outlives the driver by seconds, to end and to remove what a run leaves behind.

When the driver is killed with SIGKILL, Ray 2.60 ends its raylet and workers, but its dashboard and runtime-env agents
stay (measured), as do children of workers that don't watch their parent. The driver starts this process with the pids
that it is responsible for, one a line on stdin; `done` ends it. When the driver dies instead, everything that
descended from those pids and still lives after a grace is ended. In both cases it removes the run's temporary files
(`rlhf.cluster.scratch`): it has seen them from the start, and by then whoever used them is gone.

It runs in a session of its own, so that a Ctrl-C in the terminal and a kill of the driver's process group pass it by.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import psutil

from rlhf.cluster import scratch
from rlhf.cluster.process import carriers, end, trees

# Set in every actor's process to the reaper's marker, and so inherited by whatever an actor starts: at the driver's
# death such a process may have lost its parent before anybody has looked.
MARKER_VARIABLE = "RLHF_SESSION"
# Descendants are looked up this often besides, and new shared memory every second: a listing costs a millisecond.
_SCAN_S = 5.0
_LOOK_S = 1.0
_GRACE_S = 5.0


class Reaper:
    """The driver's handle on its reaper; `scratch` is the run's folder for temporary files on this machine."""

    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        self.scratch = scratch.scratch_of(self.marker)
        self._hold = scratch.hold(self.scratch)
        scratch.sweep()
        command = [sys.executable, "-m", "rlhf.cluster.reaper", str(os.getpid()), self.marker, str(self.scratch)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def add(self, pids: list[int]) -> None:
        """Make it responsible for these processes and their descendants."""
        self._say("".join(f"{pid}\n" for pid in pids))

    def dismiss(self) -> None:
        """End it: processes are left alone, temporary files go."""
        self._hold.close()
        self._say("done\n")
        try:
            self._process.wait(timeout=2 * _GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # somebody killed the reaper; the run itself is unharmed


def join_run(marker: str) -> None:
    """Make this process a part of the run: it is found by its marker, and its temporary files go with the run's."""
    os.environ[MARKER_VARIABLE] = marker
    scratch.use(scratch.scratch_of(marker))


def watch(driver: int, marker: str, folder: Path, orders: IO[bytes]) -> None:
    """Follow the orders of the process `driver` until it says `done`, or until it dies: then end its processes.

    The run's temporary files, those in `folder` and shared memory, are removed in both cases.
    """
    memory = scratch.SharedMemory()
    known: set[psutil.Process] = set()
    if not _follow(driver, orders, memory, known):
        names = memory.unknown()
        doomed = known.union(carriers(MARKER_VARIABLE, marker))
        memory.look(names, doomed)
        end(doomed, _GRACE_S)
    memory.remove()
    deadline = time.monotonic() + _GRACE_S
    while not scratch.remove(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _follow(driver: int, orders: IO[bytes], memory: scratch.SharedMemory, known: set[psutil.Process]) -> bool:
    """Keep `known` and `memory` up to date until the driver says `done`; false when it died before."""
    roots: set[psutil.Process] = set()
    pipe, rest, scanned = orders.fileno(), b"", 0.0
    os.set_blocking(pipe, False)
    # A pidfd besides the pipe: a forked child of the driver may hold the pipe open after the driver's death.
    pidfd = _open_pidfd(driver)
    dead = pidfd is None
    while True:
        if pidfd is not None:
            ready, _, _ = select.select([pidfd, pipe], [], [], _LOOK_S)
            dead = pidfd in ready
        read, closed = _read(pipe)
        *lines, rest = (rest + read).split(b"\n")
        if b"done" in lines:
            return True
        # A root that has ended is dropped at once: its pid may be another program's by the next look.
        roots = {process for process in roots if process.is_running()}.union(_processes(lines))
        ends, names = dead or closed, memory.unknown()
        if ends or lines or names or time.monotonic() > scanned + _SCAN_S:
            scanned = time.monotonic()
            known.difference_update({process for process in known if not process.is_running()})
            known.update(trees(process.pid for process in roots))
            memory.look(names, known)
        if ends:
            return False


def _processes(pids: Iterable[bytes]) -> Iterator[psutil.Process]:
    """The processes with these pids, as far as they live."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(int(pid))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None  # it died before this process was up


def _read(pipe: int) -> tuple[bytes, bool]:
    """All that the pipe holds, and whether its other end is closed."""
    content = b""
    while True:
        try:
            read = os.read(pipe, 65536)
        except BlockingIOError:
            return content, False
        if not read:
            return content, True
        content += read


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.stdin.buffer)
