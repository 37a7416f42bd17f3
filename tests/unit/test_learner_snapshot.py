"""Snapshots of a state and the thread that writes them; what a checkpoint may be loaded into."""

from __future__ import annotations

import errno
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.learners import snapshot
from rlhf.learners.checkpoint import check_saved, random_state, restore_random_state
from rlhf.learners.snapshot import Memory, Snapshot, Writer, collect

IDENTITY = {"role": "policy", "zero_stage": 2, "dtype": "float32"}
SAVED = {"format": 1, **IDENTITY, "world_size": 4, "counters": {"version": 7}}


def take(state: object, memory: Memory | None = None) -> Snapshot:
    """A copy of the state."""
    return (memory or Memory()).copy(collect(state))


class TestSnapshot:
    def test_stays_as_it_was_when_training_goes_on(self) -> None:
        state = {"weight": torch.ones(3), "steps": [1]}
        taken = take(state)
        state["weight"].add_(1)
        state["steps"].append(2)
        restored = taken.restore()
        assert restored["weight"].tolist() == [1.0, 1.0, 1.0]
        assert restored["steps"] == [1]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor(2.0),
            torch.empty(0, 3),
            torch.arange(6).view(2, 3).t(),
            torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            torch.nn.Parameter(torch.ones(2)),
        ],
        ids=["scalar", "empty", "transposed", "bfloat16", "parameter"],
    )
    def test_keeps_shape_type_and_values(self, tensor: torch.Tensor) -> None:
        restored = take({"nested": (tensor, [tensor])}).restore()["nested"][0]
        assert restored.dtype == tensor.dtype
        assert torch.equal(restored, tensor)
        assert not restored.requires_grad

    def test_a_view_is_its_own_elements_and_not_its_storage(self, tmp_path: Path) -> None:
        flat = torch.arange(1_000_000, dtype=torch.float32)
        taken = take([flat[10:20], flat[20:30]])
        # Twice ten elements of four bytes.
        assert taken.nbytes == 80
        torch.save(taken.restore(), tmp_path / "file.pt")
        assert (tmp_path / "file.pt").stat().st_size < 5_000

    def test_a_tensor_that_occurs_twice_is_copied_once_and_stays_one(self) -> None:
        weight = torch.ones(5)
        taken = take({"embedding": weight, "head": weight.detach()})
        assert taken.nbytes == 20
        restored = taken.restore()
        assert restored["embedding"].data_ptr() == restored["head"].data_ptr()

    def test_memory_is_used_again_and_grows_when_it_has_to(self) -> None:
        memory = Memory()
        first = take(torch.ones(100), memory).restore().data_ptr()
        assert take(torch.zeros(100), memory).restore().data_ptr() == first
        assert take(torch.full((10_000,), 3.0), memory).restore().sum() == 30_000


class TestWriter:
    def test_finish_returns_when_the_files_are_there(self, tmp_path: Path) -> None:
        writer, files = Writer(), (tmp_path / "new" / "state.pt", tmp_path / "new" / "text.json")
        writer.start({files[0]: collect({"weight": torch.ones(3)}), files[1]: b"{}"})
        report = writer.finish()
        assert torch.load(files[0])["weight"].tolist() == [1.0, 1.0, 1.0]
        assert files[1].read_bytes() == b"{}"
        assert report.bytes == sum(file.stat().st_size for file in files)
        assert report.seconds > 0

    def test_who_changes_the_state_waits_for_its_copy_and_not_for_the_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy_may_begin, files_may_be_written = threading.Event(), threading.Event()
        copy, write = Memory.copy, snapshot._write_all

        def held_copy(self: Memory, taken: Snapshot) -> Snapshot:
            copy_may_begin.wait()
            return copy(self, taken)

        def held_write(files: Any) -> int:
            files_may_be_written.wait()
            return write(files)

        monkeypatch.setattr(Memory, "copy", held_copy)
        monkeypatch.setattr(snapshot, "_write_all", held_write)
        weight, path, writer = torch.ones(3), tmp_path / "state.pt", Writer()
        writer.copied()
        writer.start({path: collect(weight)})
        threading.Timer(0.2, copy_may_begin.set).start()
        writer.copied()
        assert copy_may_begin.is_set()
        weight.add_(1)
        assert not path.exists()
        files_may_be_written.set()
        assert writer.finish().waited > 0
        assert torch.load(path).tolist() == [1.0, 1.0, 1.0]

    def test_a_copy_that_fails_lets_training_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(self: Memory, taken: Snapshot) -> Snapshot:
            raise MemoryError("not enough for the copy")

        monkeypatch.setattr(Memory, "copy", no_memory)
        writer = Writer()
        writer.start({tmp_path / "state.pt": collect(torch.ones(3))})
        writer.copied()
        with pytest.raises(MemoryError, match="not enough"):
            writer.finish()

    @pytest.mark.parametrize("large", [False, True], ids=["bytes", "snapshot"])
    def test_a_full_disk_is_raised_with_the_file_and_the_reason(self, tmp_path: Path, large: bool) -> None:
        path = tmp_path / "state.pt"
        path.symlink_to("/dev/full")
        writer = Writer()
        writer.start({path: collect(torch.ones(10_000)) if large else b"{}"})
        with pytest.raises(OSError, match=r"No space left on device: '.*state\.pt'") as raised:
            writer.finish()
        assert raised.value.errno == errno.ENOSPC

    def test_a_folder_that_can_not_be_made_is_raised(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        writer = Writer()
        writer.start({tmp_path / "file" / "shards" / "state.pt": b"{}"})
        with pytest.raises(NotADirectoryError, match="shards"):
            writer.finish()

    def test_settle_raises_a_failure_that_nobody_asked_for_and_only_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        writer = Writer()
        writer.settle()
        writer.start({tmp_path / "file" / "shards" / "state.pt": b"{}"})
        with pytest.raises(NotADirectoryError):
            writer.settle()
        writer.settle()

    def test_settle_is_silent_about_a_failure_that_finish_has_raised(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        writer = Writer()
        writer.start({tmp_path / "file" / "shards" / "state.pt": b"{}"})
        with pytest.raises(NotADirectoryError):
            writer.finish()
        writer.settle()

    def test_settle_waits_for_a_write_that_finish_waits_for_in_another_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release, write = threading.Event(), snapshot._write_all

        def held(files: Any) -> Any:
            release.wait()
            return write(files)

        monkeypatch.setattr(snapshot, "_write_all", held)
        writer = Writer()
        writer.start({tmp_path / "state.json": b"{}"})
        beside = threading.Thread(target=writer.finish)
        beside.start()
        threading.Timer(0.2, release.set).start()
        writer.settle()
        assert (tmp_path / "state.json").exists()
        beside.join()

    def test_finish_without_a_save_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="nothing was saved"):
            Writer().finish()


class TestRandomState:
    def test_all_streams_go_on_where_they_were(self) -> None:
        def draw() -> list[float]:
            return [
                random.gauss(0, 1),
                random.random(),
                np.random.normal(),
                np.random.random(),
                *torch.rand(2).tolist(),
            ]

        # The middle of a pair of normal numbers, of which the generators keep the second.
        random.gauss(0, 1)
        np.random.normal()
        state = json.loads(json.dumps(random_state(torch.device("cpu"))))
        expected = draw()
        assert draw() != expected
        restore_random_state(state, torch.device("cpu"))
        assert draw() == expected


class TestCheckSaved:
    def test_a_learner_of_the_same_kind_may_load(self) -> None:
        check_saved(SAVED, IDENTITY, 4, "error")

    @pytest.mark.parametrize(("name", "value"), [("role", "critic"), ("zero_stage", 3), ("dtype", "bfloat16")])
    def test_another_kind_is_refused_with_both_values(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"saved with {name} {SAVED[name]}, and this learner has {name} {value}"):
            check_saved(SAVED, {**IDENTITY, name: value}, 4, "convert")

    def test_another_number_of_ranks_is_refused_or_left_to_convert(self) -> None:
        check_saved(SAVED, IDENTITY, 2, "convert")
        with pytest.raises(ValueError, match="saved by 4 ranks, and this learner has 2"):
            check_saved(SAVED, IDENTITY, 2, "error")

    def test_one_from_before_the_first_update_is_not_converted(self) -> None:
        saved = {**SAVED, "counters": {"version": 0}}
        check_saved(saved, IDENTITY, 4, "convert")
        with pytest.raises(ValueError, match="before their first update"):
            check_saved(saved, IDENTITY, 2, "convert")

    def test_a_later_format_is_refused(self) -> None:
        with pytest.raises(ValueError, match="format 2, and this version reads format 1"):
            check_saved({**SAVED, "format": 2}, IDENTITY, 4, "convert")
