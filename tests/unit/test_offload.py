"""Where offloaded state can't lie, and what a person is told then."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from rlhf.config.schema import PolicyConfig
from rlhf.learners import offload
from rlhf.learners.offload import NoDisk


def test_without_libaio_a_person_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(NoDisk, match=r"libaio-dev g\+\+\)\. Or set policy\.offload_to and critic\.offload_to: host"):
        offload.make_folder()


def test_temporary_files_in_memory_are_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(NoDisk, match=r"/dev/shm is a tmpfs, which is memory\. Set TMPDIR to a folder"):
        offload.make_folder()


def test_a_disk_too_small_for_the_state_is_refused(tmp_path: Path) -> None:
    offload.check_room(tmp_path, 1000)
    # Masters, moments and gradients: 16 bytes for each.
    with pytest.raises(NoDisk, match=r"has 16000000\.0 GB, and .* GB free"):
        offload.check_room(tmp_path, 10**15)


def test_deepspeed_is_told_what_lies_where(tmp_path: Path) -> None:
    def told(**settings: str) -> dict[str, object]:
        return offload.sections(PolicyConfig(zero_stage=3, **settings), tmp_path if "offload_to" in settings else None)

    host = {"device": "cpu", "pin_memory": True}
    assert told() == {}
    assert told(offload="optimizer") == {"offload_optimizer": host}
    assert told(offload="optimizer_and_parameters") == {"offload_optimizer": host, "offload_param": host}
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}
    on_disk = {"offload_optimizer": disk, "sub_group_size": 25_000_000}
    assert told(offload="optimizer", offload_to="disk") == on_disk
    both = {**on_disk, "offload_param": host}
    assert told(offload="optimizer_and_parameters", offload_to="disk") == both
