"""Processes: how one ended, what it left behind, and that a killed driver's processes are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhf.cluster.process import ExitWatch, describe_exit, end, exit_signal, tail, trees

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]


@pytest.mark.parametrize(
    ("status", "words", "number"),
    [
        (9, "was killed by SIGKILL, signal 9", signal.SIGKILL),
        (11 | 0x80, "was killed by SIGSEGV, signal 11", signal.SIGSEGV),  # 0x80: it left a core file
        (3 << 8, "left with exit code 3", None),
        (None, "no exit status was reported", None),
    ],
)
def test_a_wait_status_is_put_in_words(status: int | None, words: str, number: int | None) -> None:
    assert words in describe_exit(status)
    assert exit_signal(status) == number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_watch_tells_the_signal_or_honestly_nothing(number: signal.Signals) -> None:
    process = subprocess.Popen(SLEEP)
    watch = ExitWatch(process.pid)
    process.send_signal(number)
    process.wait(timeout=30)
    status = watch.status(wait_s=5)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    # The kernel keeps the status of a reaped process since 6.15.
    assert exit_signal(status) == (number if release >= (6, 15) else None)
    watch.close()


def test_a_living_process_has_no_status() -> None:
    process = subprocess.Popen(SLEEP)
    assert ExitWatch(process.pid).status(wait_s=0) is None
    process.kill()
    process.wait(timeout=30)


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "policy-0.log"
    log.write_text("".join(f"line {index}\n" for index in range(5000)))
    assert tail(log, lines=2) == ["line 4998", "line 4999"]
    assert tail(tmp_path / "missing.log", lines=2) == []


def test_end_stops_a_whole_tree_and_also_what_ignores_sigterm() -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    tree = trees([process.pid])
    assert len(tree) == 2
    process.kill()
    process.wait(timeout=30)
    told = end(tree, grace_s=0.2)
    assert told == [one.pid for one in tree if one.pid != process.pid]
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in tree)


DRIVER = """
import subprocess, sys, time
from rlhf.cluster.reaper import Reaper
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
reaper = Reaper()
reaper.add([child.pid])
{orderly}
print(child.pid, reaper._process.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("orderly", [True, False])
def test_the_reaper_ends_what_a_killed_driver_leaves_unless_dismissed(orderly: bool) -> None:
    code = DRIVER.format(orderly="reaper.dismiss()" if orderly else "")
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child, reaper = (int(word) for word in driver.stdout.readline().split())
    left = psutil.Process(child)
    driver.kill()
    driver.wait(timeout=30)
    if orderly:
        assert left.is_running() and not psutil.pid_exists(reaper)
        left.kill()
    psutil.wait_procs([left], timeout=30)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
