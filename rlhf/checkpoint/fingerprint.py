"""Frozen models in a checkpoint: not copied, but recognised.

A fingerprint has, for each file of weights, settings and tokenizer, its size, for safetensors a hash of the header
(names, shapes, dtypes), and a hash of sampled blocks. Reading it costs the same few megabytes a file for a model of any
size. Weights that were trained further differ nearly everywhere, so a sample shows it; a change of single bytes between
the samples does not. Files of up to 8 MB, so all settings and most tokenizers, are hashed whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.checkpoint.errors import CheckpointError
from rlhf.config.files import is_model_folder

_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".txt", ".jinja", ".tiktoken")
)
_BLOCKS = 32
_BLOCK_BYTES = 256 << 10
# Above it a header is no header but the first bytes of another kind of file.
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class FilePrint:
    """One file: size in bytes, hash of the safetensors header where it has one, hash of the sampled blocks."""

    size: int
    header: str | None
    blocks: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a frozen model was: its path or hub name, and its files by name (none for a hub name)."""

    source: str
    files: Mapping[str, FilePrint] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """What the fingerprint can't tell, in words; None when it tells all it should."""
        if self.files:
            return None
        return f"{self.source} is a hub name: after a resume the name is compared, not what the hub has under it"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint that `as_dict` wrote."""
        return Fingerprint(data["source"], {name: FilePrint(**entry) for name, entry in data["files"].items()})


def fingerprint(path: str) -> Fingerprint:
    """The fingerprint of a model folder, or of a hub name. Raises `CheckpointError` when the files can't be read."""
    if not is_model_folder(path):
        return Fingerprint(path)
    try:
        files = {file.name: _print_of(file) for file in sorted(Path(path).iterdir()) if _belongs(file)}
    except OSError as error:
        raise CheckpointError(
            f"the model at {path} can't be read: {error.strerror} ({error.filename}); a checkpoint refers to it by "
            "path and contents, so it has to stay where it is"
        ) from error
    if not files:
        raise CheckpointError(f"the model at {path} has no files of weights, settings or tokenizer")
    return Fingerprint(path, files)


def compare(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, each with the file's name; nothing for the same contents in another folder."""
    if bool(saved.files) != bool(now.files) or (not saved.files and saved.source != now.source):
        return [f"the model was {saved.source} and is {now.source}"]
    problems = []
    for name in sorted(saved.files.keys() | now.files.keys()):
        before, after = saved.files.get(name), now.files.get(name)
        if after is None:
            problems.append(f"{now.source}/{name} is missing")
        elif before is None:
            problems.append(f"{now.source}/{name} is new")
        elif before.size != after.size:
            problems.append(f"{now.source}/{name} has {after.size} bytes, had {before.size}")
        elif before.header != after.header:
            problems.append(f"{now.source}/{name} has other tensors, shapes or dtypes")
        elif before.blocks != after.blocks:
            problems.append(f"{now.source}/{name} has other contents")
    return problems


def _belongs(file: Path) -> bool:
    return file.suffix in _SUFFIXES and not file.name.startswith(".") and file.is_file()


def _print_of(file: Path) -> FilePrint:
    size = file.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        header = opened.read(_header_bytes(file, opened.read(8), size)) if file.suffix == ".safetensors" else None
        for start in _places(size):
            opened.seek(start)
            digest.update(opened.read(_BLOCK_BYTES))
    hashed = None if header is None else hashlib.blake2b(header, digest_size=16).hexdigest()
    return FilePrint(size, hashed, digest.hexdigest())


def _header_bytes(file: Path, first: bytes, size: int) -> int:
    """Length of a safetensors header, which the file's first 8 bytes tell."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise OSError(0, "not a safetensors file", str(file))
    return length


def _places(size: int) -> Iterator[int]:
    """Where blocks begin: all of a small file; else evenly from the first block to the last, so always the same."""
    if size <= _BLOCKS * _BLOCK_BYTES:
        yield from range(0, size, _BLOCK_BYTES)
    else:
        yield from (index * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for index in range(_BLOCKS))
