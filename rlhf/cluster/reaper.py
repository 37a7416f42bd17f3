"""A small process that outlives the driver by seconds, to end what a killed driver leaves behind.

When the driver is killed with SIGKILL, Ray 2.60 ends its raylet and workers, but its dashboard and runtime-env agents
stay (measured), as do children of workers that don't watch their parent. The driver starts this process with the pids
that it is responsible for, one a line on stdin; `done` ends it. When the driver dies instead, everything that
descended from those pids and still lives after a grace is ended.

It runs in a session of its own, so that a Ctrl-C in the terminal and a kill of the driver's process group pass it by.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import IO

import psutil

from rlhf.cluster.process import carriers, end, trees

# Set in every actor's process to the reaper's marker, and so inherited by whatever an actor starts: at the driver's
# death such a process may have lost its parent before anybody has looked.
MARKER_VARIABLE = "RLHF_SESSION"
# Descendants are looked up this often besides.
_SCAN_S = 5.0
_GRACE_S = 5.0


class Reaper:
    """The driver's handle on its reaper."""

    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        command = [sys.executable, "-m", "rlhf.cluster.reaper", str(os.getpid()), self.marker]
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
        """End it; what it was responsible for is left alone."""
        self._say("done\n")
        try:
            self._process.wait(timeout=_GRACE_S)
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


def watch(driver: int, marker: str, orders: IO[bytes]) -> None:
    """Follow the orders of the process `driver` until it says `done`, or until it dies: then end its processes."""
    roots: set[psutil.Process] = set()
    known: set[psutil.Process] = set()
    pipe, rest = orders.fileno(), b""
    os.set_blocking(pipe, False)
    # A pidfd besides the pipe: a forked child of the driver may hold the pipe open after the driver's death.
    pidfd = _open_pidfd(driver)
    dead = pidfd is None
    while True:
        if pidfd is not None:
            ready, _, _ = select.select([pidfd, pipe], [], [], _SCAN_S)
            dead = pidfd in ready
        read, closed = _read(pipe)
        *lines, rest = (rest + read).split(b"\n")
        if b"done" in lines:
            return
        # A root that has ended is dropped at once: its pid may be another program's by the next look.
        roots = {process for process in roots if process.is_running()}.union(_processes(lines))
        descended = trees(process.pid for process in roots)
        known = {process for process in known if process.is_running()}.union(descended)
        if dead or closed:
            break
    end(known.union(carriers(MARKER_VARIABLE, marker)), _GRACE_S)


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
    watch(int(sys.argv[1]), sys.argv[2], sys.stdin.buffer)
