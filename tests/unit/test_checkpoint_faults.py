"""Damage, disks that refuse, and kills: a clear error or the previous checkpoint, and never none."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.checkpoint import CheckpointError, CheckpointStore, CorruptCheckpoint, NewerFormat, NoCheckpoint, Phase
from tests.unit.checkpoints import PHASES, begin, commit, failing, latest, names, save, silent, steps, truncate


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=10)


class TestDamage:
    """What is wrong is named, and the previous checkpoint is used."""

    @pytest.fixture(autouse=True)
    def saved(self, store: CheckpointStore) -> None:
        save(store, 10)
        save(store, 20)

    def shard(self, store: CheckpointStore) -> Path:
        return store.folder / "step-000020" / "policy" / "rank-1.pt"

    def check(self, store: CheckpointStore, problem: str) -> None:
        """The newest is damaged like this, and `auto` goes back to step 10 and says why."""
        said: list[str] = []
        chosen = store.choose("auto", said.append)
        assert chosen is not None and chosen.step == 10
        assert len(said) == 1
        assert problem in said[0]
        assert said[0].startswith(f"{store.folder / 'step-000020'} is damaged: ")
        assert said[0].endswith("Falls back to step-000010")

    def test_a_truncated_shard(self, store: CheckpointStore) -> None:
        newest = store.checkpoints()[-1]
        truncate(self.shard(store))
        with pytest.raises(CorruptCheckpoint) as caught:
            store.verify(newest)
        assert caught.value.problems == ("policy/rank-1.pt has 10 bytes, should have 2000",)
        assert steps(store) == [10]
        self.check(store, "policy/rank-1.pt has 10 bytes, should have 2000")

    def test_a_flipped_bit(self, store: CheckpointStore) -> None:
        content = bytearray(self.shard(store).read_bytes())
        content[1234] ^= 1
        self.shard(store).write_bytes(content)
        self.check(store, "policy/rank-1.pt has checksum ")

    def test_a_missing_file(self, store: CheckpointStore) -> None:
        self.shard(store).unlink()
        self.check(store, "policy/rank-1.pt is missing")

    def test_a_surplus_file(self, store: CheckpointStore) -> None:
        # DeepSpeed's loader takes what it finds, so a shard that nobody saved has no place there.
        self.shard(store).with_name("rank-2.pt").write_bytes(b"")
        self.check(store, "policy/rank-2.pt is surplus")

    def test_a_file_that_became_a_link(self, store: CheckpointStore, tmp_path: Path) -> None:
        self.shard(store).rename(tmp_path / "moved")
        self.shard(store).symlink_to(tmp_path / "moved")
        self.check(store, "neither a file nor a folder")

    def test_a_manifest_that_is_gone(self, store: CheckpointStore) -> None:
        (store.folder / "step-000020" / "manifest.json").unlink()
        self.check(store, "manifest.json can't be read: No such file")

    def test_a_truncated_manifest(self, store: CheckpointStore) -> None:
        truncate(store.folder / "step-000020" / "manifest.json", 100)
        self.check(store, "manifest.json can't be read: ")

    def test_a_flipped_digit_in_the_manifest(self, store: CheckpointStore) -> None:
        manifest = store.folder / "step-000020" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"weight_version": 20', '"weight_version": 21'))
        self.check(store, "manifest.json has checksum ")

    def test_the_manifest_of_another_step(self, store: CheckpointStore) -> None:
        shutil.rmtree(store.folder / "step-000020")
        shutil.copytree(store.folder / "step-000010", store.folder / "step-000020")
        self.check(store, "manifest.json belongs to step 10")

    def test_all_that_is_wrong_is_named_at_once(self, store: CheckpointStore) -> None:
        newest = store.checkpoints()[-1]
        truncate(self.shard(store))
        (newest.path / "driver.json").unlink()
        with pytest.raises(CorruptCheckpoint) as caught:
            store.verify(newest)
        assert caught.value.problems == (
            "driver.json is missing",
            "policy/rank-1.pt has 10 bytes, should have 2000",
        )

    @pytest.mark.parametrize("resume", ["auto", "must"])
    def test_when_none_can_be_loaded_no_run_begins_anew_in_silence(self, store: CheckpointStore, resume: str) -> None:
        truncate(self.shard(store))
        (store.folder / "step-000010" / "driver.json").unlink()
        with pytest.raises(NoCheckpoint) as caught:
            store.choose(resume, silent)  # type: ignore[arg-type]
        for part in ("rank-1.pt has 10 bytes", "driver.json is missing", "run.if_exists=replace"):
            assert part in str(caught.value)

    def test_a_damaged_one_in_the_way_is_set_aside_and_stays(self, store: CheckpointStore) -> None:
        truncate(store.folder / "step-000020" / "manifest.json", 100)
        store.rewind(store.choose("auto", lambda message: None))
        assert steps(store) == [10]
        save(store, 20)
        assert names(store) == ["latest", "step-000010", "step-000020", "step-000020.damaged"]
        assert store.choose("must", silent) == store.checkpoints()[-1]

    def test_a_newer_format_is_refused_and_never_passed_over_or_removed(self, store: CheckpointStore) -> None:
        manifest = store.folder / "step-000020" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
        with pytest.raises(NewerFormat, match=r"step-000020 has format 2, and this version reads up to 1"):
            store.choose("auto", silent)
        store.rewind(store.checkpoints()[0])
        assert manifest.exists()


class TestDiskErrors:
    """Path, reason and remedy are named, and all is as it was."""

    def check(self, store: CheckpointStore, reason: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            commit(store, 20)
        for part in (str(store.folder / "step-000020"), reason, "checkpoint.on_failed_save=continue"):
            assert part in str(caught.value)

    def unchanged(self, store: CheckpointStore) -> None:
        assert (names(store), latest(store)) == (["latest", "step-000010"], "step-000010\n")
        save(store, 20)  # and there is room again
        assert steps(store) == [10, 20]

    @pytest.mark.parametrize("phase", PHASES[:4])
    def test_a_disk_that_is_full_at_any_moment(self, tmp_path: Path, phase: Phase) -> None:
        full = False

        def phases(at: Phase) -> None:
            if full and at == phase:
                failing(errno.ENOSPC)()

        store = CheckpointStore(tmp_path, keep=5, phases=phases)
        save(store, 10)
        begin(store, 20)
        full = True
        self.check(store, "No space left on device")
        full = False
        self.unchanged(store)

    @pytest.mark.parametrize("call", range(1, 10))
    def test_a_sync_that_fails(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
        # 3 files, 2 folders, the manifest, its folder, the rename, `latest`.
        save(store, 10)
        begin(store, 20)
        real, calls, lock = os.fsync, 0, threading.Lock()

        def fsync(handle: int) -> None:
            nonlocal calls
            with lock:
                calls += 1
                mine = calls
            if mine == call:
                failing(errno.EIO)()
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        self.check(store, "Input/output error")
        monkeypatch.undo()
        assert calls >= call
        self.unchanged(store)

    def test_when_the_last_sync_fails_latest_has_moved_already_and_names_a_complete_checkpoint(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(store, 10)
        begin(store, 20)
        real = os.replace

        def replace(source: Path, target: Path) -> None:
            real(source, target)
            monkeypatch.setattr(os, "fsync", failing(errno.EIO))

        monkeypatch.setattr(os, "replace", replace)
        self.check(store, "Input/output error")
        assert latest(store) == "step-000020\n"
        assert store.choose("must", silent) == store.checkpoints()[1]

    def test_what_was_abandoned_and_can_not_be_removed_does_not_end_the_run(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        begin(store, 20)
        monkeypatch.setattr(shutil, "rmtree", failing(errno.EROFS))
        with caplog.at_level(logging.WARNING):
            store.abandon(20)
        assert ".writing-step-000020 could not be removed" in caplog.text
        monkeypatch.undo()
        store.clean()
        assert names(store) == []

    def test_a_folder_that_can_not_be_written(self) -> None:
        with unprivileged() as folder:
            store = CheckpointStore(folder / "checkpoints", keep=1)
            save(store, 10)
            store.folder.chmod(0o555)
            with pytest.raises(CheckpointError, match=r"cannot save .*\.writing-step-000020: Permission denied"):
                store.begin(20)
            assert (names(store), latest(store)) == (["latest", "step-000010"], "step-000010\n")
            store.folder.chmod(0o755)
            save(store, 20)

    def test_a_folder_that_is_closed_before_the_commit(self) -> None:
        with unprivileged() as folder:
            store = CheckpointStore(folder / "checkpoints", keep=5)
            save(store, 10)
            begin(store, 20)
            store.folder.chmod(0o555)
            self.check(store, "Permission denied")
            assert latest(store) == "step-000010\n"
            assert store.choose("must", silent) == store.checkpoints()[0]
            store.folder.chmod(0o755)


@contextlib.contextmanager
def unprivileged() -> Iterator[Path]:
    """A folder of a user to whom file modes mean something, and that user for the block: root may do everything."""
    folder = Path(tempfile.mkdtemp())
    nobody = 65534
    if os.geteuid() != 0:
        yield folder
    else:
        os.chown(folder, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield folder
        finally:
            os.seteuid(0)
    shutil.rmtree(folder)


KILLED = """\
import os, shutil, signal, sys
from pathlib import Path
from rlhf.checkpoint import CheckpointStore

folder, when = Path(sys.argv[1]), sys.argv[2]

def save(store, step):
    writing = store.begin(step)
    (writing / "policy").mkdir()
    (writing / "policy" / "rank-0.pt").write_bytes(bytes([step]) * 100000)
    if step == 20 and when == "begun":
        os.kill(os.getpid(), signal.SIGKILL)
    store.commit(step, weight_version=step, config={}, versions={}, metrics={})

def phases(phase):
    if phase == when and (folder / "step-000010").exists():
        os.kill(os.getpid(), signal.SIGKILL)

save(CheckpointStore(folder, keep=1), 10)
if when == "removing":
    # In the middle of a removal: one file is gone, the folder is not.
    def rmtree(path):
        (Path(path) / "policy" / "rank-0.pt").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    shutil.rmtree = rmtree
save(CheckpointStore(folder, keep=1, phases=phases), 20)
"""


@pytest.mark.parametrize(
    ("when", "left"),
    [
        ("begun", 10),
        ("written", 10),
        ("synced", 10),
        ("manifest", 10),
        ("renamed", 10),
        ("latest", 20),
        ("removing", 20),
    ],
)
def test_a_kill_leaves_the_previous_checkpoint_or_the_new_one(tmp_path: Path, when: str, left: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = CheckpointStore(tmp_path, keep=1)
    store.clean()
    said: list[str] = []
    chosen = store.choose("must", said.append)
    assert chosen is not None and chosen.step == left
    # Nothing is damaged: what was half-written or half-removed never had a checkpoint's name.
    assert not any("damaged" in message for message in said)
    store.rewind(chosen)
    save(store, 30)
    assert names(store) == ["latest", "step-000030"]
