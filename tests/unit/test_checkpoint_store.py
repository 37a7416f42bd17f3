"""The checkpoints of a run: complete or absent, one commit for all roles, and the old one goes last."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from rlhf.checkpoint import CheckpointError, CheckpointStore, CorruptCheckpoint, NoCheckpoint, Phase
from rlhf.checkpoint.manifest import hash_of
from rlhf.config.schema import KeepBestConfig
from tests.unit.checkpoints import begin, commit, failing, latest, names, save, silent, steps, truncate

ACCURACY = KeepBestConfig(metric="eval/accuracy")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=10)


class TestCommit:
    def test_manifest_says_what_the_checkpoint_holds_and_what_it_belongs_to(self, store: CheckpointStore) -> None:
        begin(store, 10)
        config = {"run": {"seed": 1, "dir": Path("/runs")}, "reward": {"functions": [{"options": {"api_key": "xyz"}}]}}
        made = store.commit(
            10,
            weight_version=9,
            config=config,
            versions={"torch": "2.13.0"},
            metrics={"reward/mean": 0.5, "policy/kl": float("nan")},
        )
        (read,) = store.checkpoints()
        assert read == made
        assert (read.path, read.step, read.weight_version) == (store.folder / "step-000010", 10, 9)
        assert read.versions == {"torch": "2.13.0"}
        # What is no number judges nothing; what is secret is not written down.
        assert read.metrics == {"reward/mean": 0.5}
        assert read.config["run"] == {"seed": 1, "dir": "/runs"}
        assert read.config["reward"] == {"functions": [{"options": {"api_key": "<redacted>"}}]}
        assert read.config_hash == hash_of(read.config)
        assert {name: entry.size for name, entry in read.files.items()} == {
            "driver.json": 12,
            "policy/rank-0.pt": 2000,
            "policy/rank-1.pt": 2000,
        }
        assert read.bytes == 4012

    @pytest.mark.parametrize("size", [0, 5, (4 << 20) + 1])
    def test_checksums_are_blake2b_of_the_contents(self, store: CheckpointStore, size: int) -> None:
        # 4 MiB are read at a time.
        content = bytes(range(251)) * (size // 251 + 1)
        (store.begin(1) / "weights.bin").write_bytes(content[:size])
        entry = commit(store, 1).files["weights.bin"]
        assert (entry.size, entry.checksum) == (size, hashlib.blake2b(content[:size], digest_size=16).hexdigest())

    def test_latest_names_the_new_checkpoint_and_nothing_else_is_left(self, store: CheckpointStore) -> None:
        save(store, 10)
        save(store, 20)
        assert names(store) == ["latest", "step-000010", "step-000020"]
        assert latest(store) == "step-000020\n"

    def test_phases_come_in_the_order_of_the_invariants(self, tmp_path: Path) -> None:
        seen: list[tuple[Phase, list[str]]] = []

        def phases(phase: Phase) -> None:
            seen.append((phase, names(store)))

        store = CheckpointStore(tmp_path, keep=1, phases=phases)
        save(store, 1)
        seen.clear()
        save(store, 2)
        before = [".writing-step-000002", "latest", "step-000001"]
        both = ["latest", "step-000001", "step-000002"]
        assert seen == [
            ("written", before),
            ("synced", before),
            ("manifest", before),
            ("renamed", both),
            ("latest", both),
            ("retained", ["latest", "step-000002"]),
        ]

    def test_every_file_and_folder_is_synced_before_the_manifest_and_the_parent_after_the_rename(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin(store, 10)
        synced: list[str] = []
        real = os.fsync

        def fsync(handle: int) -> None:
            synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), store.folder))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        commit(store, 10)
        writing = ".writing-step-000010"
        files = [f"{writing}/{name}" for name in ("driver.json", "policy/rank-0.pt", "policy/rank-1.pt")]
        assert sorted(synced[:3]) == files  # by several threads
        assert synced[3:] == [
            f"{writing}/policy",
            writing,
            f"{writing}/manifest.json",
            writing,
            ".",  # the rename
            ".latest.new",
            ".",  # `latest`
        ]

    def test_a_step_is_saved_once(self, store: CheckpointStore) -> None:
        save(store, 10)
        with pytest.raises(CheckpointError, match=r"step 10 is saved already in .*step-000010"):
            store.begin(10)
        store.begin(20)
        with pytest.raises(CheckpointError, match="step 20 is being saved already"):
            store.begin(20)

    def test_what_was_not_begun_is_not_committed(self, store: CheckpointStore) -> None:
        with pytest.raises(CheckpointError, match="step 10 was not begun"):
            commit(store, 10)
        store.begin(10)
        store.abandon(10)
        store.abandon(10)
        with pytest.raises(CheckpointError, match="step 10 was not begun"):
            commit(store, 10)
        assert names(store) == []

    def test_a_link_is_not_part_of_a_checkpoint(self, store: CheckpointStore, tmp_path: Path) -> None:
        folder = begin(store, 10)
        (tmp_path / "elsewhere").write_text("")
        (folder / "policy" / "link.pt").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"neither a file nor a folder .*link\.pt"):
            commit(store, 10)

    def test_threads_commit_one_after_the_other(self, tmp_path: Path) -> None:
        inside = threading.Semaphore(1)
        overlapped: list[Phase] = []

        def phases(phase: Phase) -> None:
            if phase == "written" and not inside.acquire(blocking=False):
                overlapped.append(phase)
            if phase == "retained":
                inside.release()

        store = CheckpointStore(tmp_path, keep=10, phases=phases)
        for step in range(1, 7):
            begin(store, step)
        threads = [threading.Thread(target=commit, args=(store, step)) for step in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (overlapped, steps(store)) == ([], [1, 2, 3, 4, 5, 6])


class TestRetention:
    def test_the_newest_stay(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        for step in (10, 20, 30):
            save(store, step)
        assert names(store) == ["latest", "step-000020", "step-000030"]

    def test_the_limit_holds_over_a_restart_and_nothing_foreign_is_touched(self, tmp_path: Path) -> None:
        (tmp_path / "step-000001").mkdir()  # without a manifest: not ours to delete
        (tmp_path / "step-000002").mkdir()
        (tmp_path / "step-000002" / "manifest.json").write_text('{"format": "theirs"}')
        (tmp_path / "best-model").mkdir()
        (tmp_path / "notes.txt").write_text("lr 1e-5 was better")
        for begins in (10, 40):
            store = CheckpointStore(tmp_path, keep=2)
            store.clean()
            for step in (begins, begins + 10, begins + 20):
                save(store, step)
        assert names(store) == [
            "best-model",
            "latest",
            "notes.txt",
            "step-000001",
            "step-000002",
            "step-000050",
            "step-000060",
        ]

    @pytest.mark.parametrize(("mode", "best"), [("max", 20), ("min", 10)])
    def test_the_best_stays_beside_the_newest_over_a_restart(self, tmp_path: Path, mode: str, best: int) -> None:
        keep_best = KeepBestConfig.model_validate({"metric": "eval/accuracy", "mode": mode})
        store = CheckpointStore(tmp_path, keep=1, keep_best=keep_best)
        for step, accuracy in ((10, 0.2), (20, 0.9), (30, 0.5)):
            save(store, step, eval_accuracy=accuracy)
        store = CheckpointStore(tmp_path, keep=1, keep_best=keep_best)
        save(store, 40, eval_accuracy=0.4)
        assert steps(store) == [best, 40]

    def test_of_equally_good_ones_the_newer_is_the_best(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=1, keep_best=ACCURACY)
        for step, accuracy in ((10, 0.5), (20, 0.5), (30, 0.1)):
            save(store, step, eval_accuracy=accuracy)
        assert steps(store) == [20, 30]

    def test_one_that_was_not_judged_is_not_the_best(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=1, keep_best=ACCURACY)
        save(store, 10, eval_accuracy=0.1)
        save(store, 20)
        save(store, 30)
        assert steps(store) == [10, 30]

    def test_what_latest_names_stays_when_later_steps_lie_there(self, tmp_path: Path) -> None:
        # A run went back from step 40 to 10 and did not rewind: with keep 1 the newest is 40, and 20 was just saved.
        store = CheckpointStore(tmp_path, keep=1)
        save(store, 40)
        save(store, 20)
        assert (latest(store), steps(store)) == ("step-000020\n", [20, 40])

    def test_a_truncated_one_does_not_count_among_the_newest(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        save(store, 10)
        save(store, 20)
        truncate(tmp_path / "step-000020" / "policy" / "rank-1.pt")
        save(store, 30)
        assert names(store) == ["latest", "step-000010", "step-000030"]

    def test_what_can_not_be_removed_is_a_warning_and_the_new_one_is_safe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = CheckpointStore(tmp_path, keep=1)
        save(store, 10)
        monkeypatch.setattr(shutil, "rmtree", failing(errno.EIO))
        with caplog.at_level(logging.WARNING):
            assert save(store, 20).step == 20
        assert "step-000010 is not kept, and could not be removed" in caplog.text
        monkeypatch.undo()
        assert CheckpointStore(tmp_path, keep=1).choose("must", silent) == store.checkpoints()[-1]


class TestChoose:
    def test_an_empty_folder_is_a_beginning_with_auto_and_an_error_with_must(self, store: CheckpointStore) -> None:
        assert store.choose("auto", silent) is None
        assert store.latest(silent) is None
        with pytest.raises(NoCheckpoint, match=r"checkpoint\.resume is must, and there is no checkpoint in .*auto"):
            store.choose("must", silent)

    def test_latest_is_taken_and_what_came_after_it_is_said(self, store: CheckpointStore) -> None:
        ten = save(store, 10)
        save(store, 20)
        (store.folder / "latest").write_text("step-000010\n")
        said: list[str] = []
        assert store.latest(silent) == ten
        assert store.choose("auto", said.append) == ten
        assert said == ["step-000020 was not committed when the run ended; goes on from step-000010"]

    @pytest.mark.parametrize("content", [None, "", "step-000030\n", "../elsewhere\n", "\udcff"])
    def test_without_a_usable_latest_the_newest_is_taken_and_said(
        self, store: CheckpointStore, content: str | None
    ) -> None:
        save(store, 10)
        twenty = save(store, 20)
        if content is None:
            (store.folder / "latest").unlink()
        else:
            (store.folder / "latest").write_bytes(content.encode(errors="surrogateescape"))
        said: list[str] = []
        assert store.latest(said.append) == twenty
        assert store.choose("must", said.append) == twenty
        assert len(said) == 2
        assert all("latest" in message and "step-000020" in message for message in said)

    def test_a_path_is_that_very_checkpoint(self, store: CheckpointStore, tmp_path: Path) -> None:
        ten = save(store, 10)
        save(store, 20)
        assert store.choose(ten.path, silent) == ten
        moved = tmp_path / "kept"
        shutil.copytree(ten.path, moved)
        fresh = CheckpointStore(tmp_path / "other", keep=1)
        chosen = fresh.choose(moved, silent)
        assert chosen is not None and (chosen.path, chosen.step) == (moved, 10)

    def test_a_damaged_checkpoint_at_a_path_is_an_error_and_nothing_else_is_taken(self, store: CheckpointStore) -> None:
        save(store, 10)
        path = save(store, 20).path
        truncate(path / "driver.json", 1)
        with pytest.raises(CorruptCheckpoint, match=r"driver\.json has 1 bytes, should have 12"):
            store.choose(path, silent)

    def test_a_path_that_is_no_checkpoint_is_refused_and_those_below_are_named(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        save(store, 10)
        with pytest.raises(NoCheckpoint, match=r"has no manifest\.json; in it there are step-000010\. Give"):
            CheckpointStore(tmp_path / "new", keep=1).choose(store.folder, silent)
        with pytest.raises(NoCheckpoint, match=r"nowhere is not a checkpoint"):
            store.choose(store.folder / "nowhere", silent)

    def test_weights_to_start_from_are_checked_and_the_setting_is_named(self, store: CheckpointStore) -> None:
        ten = save(store, 10)
        assert store.at(ten.path, "checkpoint.init_from") == ten
        with pytest.raises(NoCheckpoint, match=r"^checkpoint\.init_from .*nowhere is not a checkpoint"):
            store.at(store.folder / "nowhere", "checkpoint.init_from")

    def test_a_run_that_began_at_a_path_goes_on_from_its_own_checkpoints(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        # Else the same command, started again after a kill, would go back to its beginning each time.
        beginning = save(store, 10)
        run = CheckpointStore(tmp_path / "run", keep=1)
        assert run.choose(beginning.path, silent) == beginning
        own = save(run, 20)
        said: list[str] = []
        assert run.choose(beginning.path, said.append) == own
        assert said == [
            f"checkpoint.resume {beginning.path} is where this run began; it goes on from its own step-000020"
        ]

    def test_a_folder_that_can_not_be_read_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").write_text("")
        with pytest.raises(CheckpointError, match=r"cannot read .*checkpoints: Not a directory"):
            CheckpointStore(tmp_path / "checkpoints", keep=1).choose("auto", silent)


class TestRewind:
    def test_later_checkpoints_go_and_the_chosen_one_is_the_latest(self, store: CheckpointStore) -> None:
        ten = save(store, 10)
        save(store, 20)
        save(store, 30)
        store.rewind(ten)
        assert (names(store), latest(store)) == (["latest", "step-000010"], "step-000010\n")
        save(store, 20)
        assert steps(store) == [10, 20]

    def test_killed_before_anything_was_removed_it_is_still_the_latest(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ten = save(store, 10)
        save(store, 20)
        monkeypatch.setattr(Path, "rename", failing(errno.EIO))
        with pytest.raises(CheckpointError):
            store.rewind(ten)
        assert store.choose("auto", lambda message: None) == ten

    def test_a_beginning_removes_all_of_ours(self, store: CheckpointStore) -> None:
        save(store, 10)
        (store.folder / "notes").mkdir()
        store.rewind(None)
        assert names(store) == ["notes"]


class TestClean:
    def test_what_a_dead_process_left_goes_and_nothing_else(self, store: CheckpointStore) -> None:
        save(store, 10)
        for leftover in (".writing-step-000020", ".removing-step-000005", ".writing-notes", "writing-step-000020"):
            (store.folder / leftover / "policy").mkdir(parents=True)
        (store.folder / ".latest.new").write_text("step-")
        CheckpointStore(store.folder, keep=1).clean()
        assert names(store) == [".writing-notes", "latest", "step-000010", "writing-step-000020"]

    def test_what_is_being_written_stays(self, store: CheckpointStore) -> None:
        begin(store, 10)
        store.clean()
        assert commit(store, 10).bytes == 4012

    def test_a_leftover_is_emptied_when_its_step_begins_again(self, store: CheckpointStore) -> None:
        (store.folder / ".writing-step-000010").mkdir(parents=True)
        (store.folder / ".writing-step-000010" / "old.pt").write_text("")
        assert sorted(save(store, 10).files) == ["driver.json", "policy/rank-0.pt", "policy/rank-1.pt"]
