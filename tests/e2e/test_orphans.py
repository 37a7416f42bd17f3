"""After any end nothing of a run is left on the machine but its folder, and two runs at once don't meet."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from rlhf.cluster import scratch
from rlhf.cluster.scratch import SHARED_MEMORY
from tests.e2e.command import LEFT_S, Command, Outcome, tiny_config

RUN_S = 400.0
END_S = 60.0


class Watched:
    """A run whose temporary files, ports and shared memory are noted while it runs."""

    def __init__(self, name: str, model: Path, folder: Path, temp: Path, *overrides: str) -> None:
        self.temp = temp
        self.began = time.time() - 1.0  # Linux tells when a process began to a second
        self.ports: set[int] = set()
        self.memory: set[str] = set()
        self.files: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(self.temp))
            # What torch compiled is for the next run: it stays, and by default among the temporary files.
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
            self.command = Command(tiny_config(model, folder / "runs", name), folder, *overrides)
        self.outcome: Outcome | None = None

    def look(self) -> None:
        """Note what its processes hold now."""
        self.command.observe()
        self.files |= {path.name for path in self.temp.iterdir()}
        for pid in self.command.pids:
            try:
                process = psutil.Process(pid)
                connections = process.net_connections("tcp")
                self.ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
                mapped = (Path(entry.path) for entry in process.memory_maps())
                # What was unlinked already can't be left.
                self.memory |= {path.name for path in mapped if path.parent == SHARED_MEMORY and path.exists()}
            except psutil.Error:
                continue

    def end(self, number: signal.Signals, pid: int | None) -> None:
        """Send a signal that ends the run."""
        assert pid is not None
        self.look()
        os.kill(pid, number)

    def left(self) -> list[str]:
        """What of it is still there 60 seconds after its end."""
        assert self.outcome is not None
        found = self.outcome.left_running()
        deadline = time.monotonic() + LEFT_S
        while (still := self._files_and_ports()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return found + still

    def _files_and_ports(self) -> list[str]:
        return [
            *(str(path) for path in self.temp.rglob("*")),
            *(name for name in sorted(self.memory) if (SHARED_MEMORY / name).exists()),
            *(f"port {port} of {holder}" for port, holder in self._listening() if port in self.ports),
        ]

    def _listening(self) -> Iterator[tuple[int, str]]:
        """Ports that are open now, each with its process, where the run could have started that.

        On another address an older process may have the same number, and a released number may be a stranger's now.
        """
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid is not None:
                try:
                    holder = psutil.Process(connection.pid)
                    if holder.create_time() >= self.began:
                        yield connection.laddr.port, " ".join(holder.cmdline())[:120]
                except psutil.NoSuchProcess:
                    continue


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder for temporary files. Not pytest's, in which the path of a Unix socket would be too long."""
    folder = Path(tempfile.mkdtemp(prefix="test-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def follow(runs: Sequence[Watched], seconds: float = RUN_S) -> None:
    """Look at the runs until all have ended."""
    deadline = time.monotonic() + seconds
    while any(run.command.process.poll() is None for run in runs):
        for run in runs:
            run.look()
        assert time.monotonic() < deadline, "\n".join(run.command.output() for run in runs)
        time.sleep(0.5)
    for run in runs:
        run.outcome = run.command.wait(1.0)


@pytest.fixture(scope="module")
def together(tiny_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Watched]]:
    """Two runs at the same time, in the same folder for temporary files, to their ends."""
    folder = tmp_path_factory.mktemp("together")
    with temporary() as temp:
        runs = [Watched(name, tiny_untied, folder, temp) for name in ("one", "two")]
        follow(runs)
        yield runs


@pytest.fixture(scope="module")
def cut(tiny_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watched]]:
    """Three runs at the same time, each ended in another way after its first step; two have engines of two workers."""
    folder = tmp_path_factory.mktemp("cut")
    engines = {"failed": 1, "interrupted": 2, "killed": 2}
    with ExitStack() as stack:
        runs = {
            name: Watched(
                name,
                tiny_untied,
                folder,
                stack.enter_context(temporary()),
                "run.steps=100000",
                f"rollout.tensor_parallel={devices}",
            )
            for name, devices in engines.items()
        }
        for run in runs.values():
            run.command.until(lambda run=run: run.command.steps_done() >= 1)
        runs["failed"].end(signal.SIGKILL, runs["failed"].command.find_role("policy"))
        runs["interrupted"].end(signal.SIGINT, runs["interrupted"].command.process.pid)
        runs["killed"].end(signal.SIGKILL, runs["killed"].command.process.pid)
        follow(list(runs.values()), END_S)
        yield runs


def test_nothing_is_left_of_a_finished_run(together: list[Watched]) -> None:
    for run in together:
        # It did have what could be left.
        assert run.command.pids and run.ports and run.files
        assert run.left() == []


@pytest.mark.parametrize(("name", "code"), [("failed", 1), ("interrupted", 130), ("killed", -signal.SIGKILL)])
def test_nothing_is_left_of_a_run_that_was_cut_short(cut: dict[str, Watched], name: str, code: int) -> None:
    run = cut[name]
    assert run.outcome is not None and run.outcome.code == code, run.command.output()
    assert run.command.pids and run.ports and run.files
    # An engine of two workers always has shared memory.
    assert run.memory or name == "failed"
    assert run.left() == []


def test_two_runs_at_once_have_folders_of_their_own_and_both_finish(together: list[Watched]) -> None:
    for run in together:
        assert run.outcome is not None and run.outcome.code == 0, run.command.output()
        # Two steps of 3 prompts with 4 samples each.
        assert [line["ledger/trained"] for line in run.outcome.metrics()] == [12, 24]
    seen = set().union(*(run.files for run in together))
    assert sum(name.startswith(scratch.PREFIX) for name in seen) == 2
