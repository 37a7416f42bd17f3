"""A reward worker process, seen from the parent.

Invariants
- One process serves one thread of the pool, one call at a time. That thread started it, and outlives it: the kernel's
  parent-death signal fires when the *thread* that started a process ends.
- A process that a signal ends is replaced, and its call made once more, in the middle of the function too: what kills
  from outside seldom comes twice, and a function that ends its own process does it again. Nothing else is tried again.
- Every read and write has a deadline. At `timeout_s` the process and all that it started are killed with SIGKILL.
- The clock of a call starts when the worker says that the function starts; booting and queueing don't count.
- The process is started by exec and never by fork, and doesn't import the parent's main module.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlhf.rewards.types import RewardError, RewardInput
from rlhf.rewards.worker import READY, STARTED, CallResult, FunctionSpec

# Importing a user's module may pull in anything; a worker that isn't up by then won't come up.
BOOT_DEADLINE_S = 120.0
# An idle worker takes a call at once; this long means that it was stopped or the machine is thrashing.
START_DEADLINE_S = 60.0
# How long a process may take to be gone after SIGKILL.
REAP_DEADLINE_S = 10.0

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from rlhf.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended, in words that follow its name."""

    how: str
    by_signal: bool = False

    def __str__(self) -> str:
        return self.how


class WorkerProcess:
    """One killable process that holds all reward functions; started when a call needs it, and again after a kill."""

    def __init__(self, specs: Sequence[FunctionSpec], base_dir: str) -> None:
        self._specs = tuple(specs)
        self._base_dir = base_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """The running process, None when there is none."""
        return self._process.pid if self._process else None

    def ensure_started(self) -> Connection:
        """The pipe to a process that has loaded all functions; raises `RewardError` when none can be had."""
        # Nothing is expected from an idle worker, so anything to read is the end of its pipe: it has died.
        if self._pipe is not None and not self._pipe.poll(0):
            return self._pipe
        self.end()
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(START_DEADLINE_S), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._pipe = Connection(ours.detach())
        with theirs:
            self._process = self._spawn(theirs.fileno())
        if self._stopped:  # after the start, so that either this sees the flag or `stop` sees the process
            self.end()
            raise RewardError("the reward pool was closed")
        try:
            self._pipe.send(self._specs)
            said = self._receive(self._pipe, BOOT_DEADLINE_S)
        except (EOFError, OSError) as error:
            raise RewardError(f"a reward worker didn't start: it {self.end()}") from error
        if said != READY:
            self.end()
            raise RewardError(str(said) if said else f"a reward worker didn't start within {BOOT_DEADLINE_S:g} s")
        return self._pipe

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        path = json.dumps([self._base_dir, *sys.path])
        try:
            return subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, str(descriptor), str(os.getpid()), path],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                cwd=self._base_dir,
                process_group=0,
            )
        except OSError as error:
            raise RewardError(f"a reward worker can't be started in the folder {self._base_dir}: {error}") from error

    def call(self, function: int, samples: Sequence[RewardInput], timeout_s: float) -> CallResult:
        """Run one function on one group; blocks for at most the boot, start and call deadlines, twice after a kill.

        A process that is killed by a signal while the function runs is replaced once; after that its death is the
        call's result, as is an exit or the deadline at once.
        """
        for attempt in (1, 2):
            pipe = self._begin(function, samples)
            try:
                result = self._receive(pipe, timeout_s)
            except (EOFError, OSError):
                ending = self.end()
                if ending.by_signal and attempt == 1 and not self._stopped:
                    continue
                twice = " when its call was made once more" if attempt == 2 else ""
                return CallResult(error=f"ended its worker process, which {ending}{twice}")
            if isinstance(result, CallResult):
                return result
            self.end()
            return CallResult(
                error=f"was still running after reward.timeout_s = {timeout_s:g} s and was killed: make it faster or "
                "raise reward.timeout_s"
            )
        raise AssertionError("the second attempt returns")

    def _begin(self, function: int, samples: Sequence[RewardInput]) -> Connection:
        """Have a process start the function; one that was gone before that is replaced once."""
        for attempt in (1, 2):
            pipe = self.ensure_started()
            try:
                pipe.send((function, samples))
                if self._receive(pipe, START_DEADLINE_S) == STARTED:
                    return pipe
                how = f"took no call within {START_DEADLINE_S:g} s"
                self.end()
            except (EOFError, OSError):
                how = str(self.end())
            if attempt == 2:
                raise RewardError(f"two reward workers in a row ended before a function started: the last {how}")
        raise AssertionError("the second attempt returns or raises")

    @staticmethod
    def _receive(pipe: Connection, deadline_s: float) -> object:
        """The next message, or None at the deadline."""
        return pipe.recv() if pipe.poll(deadline_s) else None

    def stop(self) -> None:
        """Kill the process and all that it started, and start none again; for use from another thread."""
        self._stopped = True
        self._kill(self._process)

    def end(self) -> Ending:
        """Close the pipe, kill the process and all that it started, and say how the process ended."""
        pipe, process = self._pipe, self._process
        self._pipe = self._process = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return Ending("was not running")
        self._kill(process)
        try:
            code = process.wait(REAP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return Ending(f"could not be killed (pid {process.pid})")
        if code < 0:
            return Ending(f"was killed by {signal.Signals(-code).name} (pid {process.pid})", by_signal=True)
        return Ending(f"exited with code {code} (pid {process.pid})")

    @staticmethod
    def _kill(process: subprocess.Popen[bytes] | None) -> None:
        # Only processes that were not reaped yet are killed, so that the group's number can't be someone else's.
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
