"""Temporary files of a run: gone when nobody uses them, however the run ended, and nobody else's touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from rlhf.cluster import scratch
from rlhf.cluster.scratch import SHARED_MEMORY, SharedMemory, hold, remove, scratch_of, sweep


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder for temporary files, with a longer name than Ray could use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_LONGEST_BASE", 1000)
    return tmp_path


def test_a_folder_stays_while_somebody_uses_it(base: Path) -> None:
    folder = scratch_of("0123456789abcdef")
    assert folder == base / "rlhf-01234567"
    first, second = hold(folder), hold(folder)
    (folder / "file").write_text("")
    for lock in (first, second):
        assert not remove(folder)
        assert (folder / "file").exists()
        lock.close()
    assert remove(folder)
    assert not folder.exists()
    assert remove(folder)  # once more is no error


def test_a_folder_that_was_removed_can_be_used_again(base: Path) -> None:
    folder = scratch_of("0123456789abcdef")
    hold(folder).close()
    assert remove(folder)
    lock = hold(folder)
    assert not remove(folder)
    lock.close()


USES = """
import subprocess, sys, tempfile
from pathlib import Path
from rlhf.cluster import scratch
scratch.use(Path(sys.argv[1]))
child = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
print(tempfile.mkdtemp(), subprocess.check_output(child, text=True).strip(), flush=True)
input()
"""


def test_a_process_and_its_children_use_the_folder_until_it_is_killed(base: Path) -> None:
    folder = base / "rlhf-01234567"
    process = subprocess.Popen(
        [sys.executable, "-c", USES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    made, of_child = process.stdout.readline().split()
    assert Path(made).parent == Path(of_child) == folder
    assert not remove(folder)
    process.kill()
    process.wait(20)
    assert remove(folder)


def test_what_torch_compiles_outlives_the_run(base: Path) -> None:
    folder = scratch_of("0123456789abcdef")
    compiles = """
import sys, torch
from pathlib import Path
from rlhf.cluster import scratch
scratch.use(Path(sys.argv[1]))
scratch.use(Path(sys.argv[1]))  # a child that inherits the environment
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
for name, parent in (("kernel", cache_dir()), ("header", default_cache_dir())):
    Path(parent, name).write_text("")
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {"TMPDIR": str(base)}
    subprocess.run([sys.executable, "-c", compiles, str(folder)], check=True, env=environment)
    assert remove(folder)
    (cache,) = base.iterdir()
    assert sorted(file.name for file in cache.iterdir()) == ["header", "kernel"]


def test_the_next_start_removes_a_runs_folder_that_nobody_uses_and_no_other(base: Path) -> None:
    dead, alive, other = base / "rlhf-00000000", base / "rlhf-11111111", base / "rlhf-training"
    hold(dead).close()
    lock = hold(alive)
    other.mkdir()
    sweep()
    assert sorted(path.name for path in base.iterdir()) == [alive.name, other.name]
    lock.close()


def test_a_base_too_long_for_a_socket_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # 29 characters, a slash and 13 for the folder, and 64 for Ray's session and socket: 107.
    for length, expected in ((29, "/" + 28 * "x"), (30, "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", "/" + (length - 1) * "x")
        assert str(scratch_of("0123456789abcdef").parent) == expected


MAPS = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
input()
"""


@pytest.fixture
def mapper() -> Iterator[subprocess.Popen[str]]:
    """A process that makes shared memory, says its name, and leaves it behind when it is killed."""
    process = subprocess.Popen([sys.executable, "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(20)


def test_shared_memory_of_killed_processes_is_removed(mapper: subprocess.Popen[str]) -> None:
    memory = SharedMemory()
    assert mapper.stdout is not None
    name = mapper.stdout.readline().strip()
    memory.look(memory.unknown(), [psutil.Process(mapper.pid)])
    memory.remove()
    assert (SHARED_MEMORY / name).exists()  # it is in use
    mapper.kill()
    mapper.wait(20)
    memory.remove()
    assert not (SHARED_MEMORY / name).exists()


@pytest.fixture
def shared() -> Iterator[shared_memory.SharedMemory]:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    yield memory
    memory.unlink()


def test_shared_memory_from_before_the_run_stays(shared: shared_memory.SharedMemory) -> None:
    memory = SharedMemory()
    memory.look(memory.unknown(), [psutil.Process()])
    shared.close()
    memory.remove()
    assert (SHARED_MEMORY / shared.name).exists()


def test_shared_memory_of_others_stays(mapper: subprocess.Popen[str]) -> None:
    memory = SharedMemory()
    assert mapper.stdout is not None
    name = mapper.stdout.readline().strip()
    memory.look(memory.unknown(), [psutil.Process()])
    mapper.kill()
    mapper.wait(20)
    memory.remove()
    (SHARED_MEMORY / name).unlink()  # fails when it is gone
