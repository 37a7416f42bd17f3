"""Frozen models are recognised by their files, without reading all of them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from rlhf.checkpoint import CheckpointError, Fingerprint, compare, fingerprint

MIB = 1 << 20


def weights(path: Path, shape: tuple[int, int], fill: int = 0) -> None:
    """A safetensors file with one float32 tensor, its bytes all `fill`."""
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes([fill]) * size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    weights(folder / "model.safetensors", (10, 20))
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("hello")
    return folder


def changes(model: Path, before: Fingerprint) -> list[str]:
    return [problem.removeprefix(f"{model}/") for problem in compare(before, fingerprint(str(model)))]


def test_the_same_files_are_recognised_also_in_another_folder(model: Path, tmp_path: Path) -> None:
    before = fingerprint(str(model))
    shutil.copytree(model, tmp_path / "copy")
    assert compare(before, fingerprint(str(model))) == []
    assert compare(before, fingerprint(str(tmp_path / "copy"))) == []
    assert before.note is None


def test_it_covers_weights_settings_and_tokenizer_and_nothing_else(model: Path) -> None:
    before = fingerprint(str(model))
    assert sorted(before.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    (model / "README.md").write_text("another text")
    (model / ".cache.json").write_text("{}")
    (model / "onnx").mkdir()
    assert changes(model, before) == []


def test_it_survives_json(model: Path) -> None:
    before = fingerprint(str(model))
    assert Fingerprint.from_dict(json.loads(json.dumps(before.as_dict()))) == before


def test_each_kind_of_change_is_named_with_the_file(model: Path) -> None:
    before = fingerprint(str(model))
    # 800 bytes of tensor either way: only the header tells.
    weights(model / "model.safetensors", (20, 10))
    (model / "config.json").write_text('{"hidden_size": 128}')
    (model / "tokenizer.json").unlink()
    (model / "vocab.txt").write_text("a")
    assert changes(model, before) == [
        "config.json has 20 bytes, had 19",
        "model.safetensors has other tensors, shapes or dtypes",
        "tokenizer.json is missing",
        "vocab.txt is new",
    ]


def test_every_byte_of_a_small_file_counts(model: Path) -> None:
    before = fingerprint(str(model))
    (model / "config.json").write_text('{"hidden_size": 65}')
    assert changes(model, before) == ["config.json has other contents"]


def test_weights_that_were_trained_further_are_seen_in_a_large_file(model: Path) -> None:
    weights(model / "model.safetensors", (1024, 8192))  # 32 MiB
    before = fingerprint(str(model))
    weights(model / "model.safetensors", (1024, 8192), fill=1)
    assert changes(model, before) == ["model.safetensors has other contents"]


@pytest.mark.parametrize("place", ["first", "last"])
def test_samples_of_a_large_file_include_its_ends(model: Path, place: str) -> None:
    weights(model / "model.safetensors", (1024, 8192))
    before = fingerprint(str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(200 if place == "first" else 32 * MIB)
        file.write(b"\x01")
    assert changes(model, before) == ["model.safetensors has other contents"]


def test_a_model_of_any_size_costs_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 100 GB that are nowhere on the disk: a file with a hole.
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(100 * 1000**3)
    read = 0
    real = Path.open

    class Counted:
        def __init__(self, path: Path) -> None:
            self.file = real(path, "rb")

        def read(self, size: int) -> bytes:
            nonlocal read
            content = self.file.read(size)
            read += len(content)
            return content

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(path))
    assert fingerprint(str(model)).files["model.safetensors"].size == 100 * 1000**3
    # 32 blocks of 256 KiB, the header, and the two small files.
    assert 8 * MIB < read < 8 * MIB + 1000


def test_of_a_hub_name_only_the_name_is_compared_and_that_is_said() -> None:
    before = fingerprint("organisation/name")
    assert before.note is not None and "not what the hub has under it" in before.note
    assert compare(before, fingerprint("organisation/name")) == []
    assert compare(before, fingerprint("organisation/other")) == [
        "the model was organisation/name and is organisation/other"
    ]


def test_a_hub_name_and_a_folder_are_not_the_same_model(model: Path) -> None:
    hub, folder = fingerprint("organisation/name"), fingerprint(str(model))
    assert compare(hub, folder) == [f"the model was organisation/name and is {model}"]
    assert compare(folder, hub) == [f"the model was {model} and is organisation/name"]


def test_a_folder_that_is_gone_or_holds_no_model_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the model at .*nowhere can't be read: No such file"):
        fingerprint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="has no files of weights, settings or tokenizer"):
        fingerprint(str(tmp_path))
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"not a safetensors file \(.*model\.safetensors\)"):
        fingerprint(str(model))
