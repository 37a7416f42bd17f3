"""`manifest.json`: what a checkpoint holds, and what it belongs to. Text in, text out; nothing here touches a disk.

Invariants
- A manifest carries a checksum of itself, so one flipped character in it is noticed like one in a shard.
- It is strict JSON, and holds no secret: the configuration in it is redacted.
- A format that is newer than ours is refused by that name, and never taken for damage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhf.checkpoint.errors import CorruptCheckpoint, NewerFormat
from rlhf.config.redaction import redact

FORMAT = 1
MANIFEST = "manifest.json"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its size in bytes and the blake2b checksum (hex) of its contents."""

    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; `files` are by path below `path`, with slashes.

    `metrics` are those it was judged by, finite numbers only. `config` is redacted and plain data.
    """

    path: Path
    step: int
    weight_version: int
    config: Mapping[str, Any]
    config_hash: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]

    @property
    def bytes(self) -> int:
        """Size of all files, the manifest left out."""
        return sum(entry.size for entry in self.files.values())


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as strict JSON can hold it, secrets redacted; what JSON has no word for becomes text."""
    return {str(key): _plain(value) for key, value in redact(config).items()}


def hash_of(data: Any) -> str:
    """Checksum (hex) of plain data, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def describe(
    path: Path,
    step: int,
    *,
    weight_version: int,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    metrics: Mapping[str, float],
    files: Mapping[str, FileEntry],
) -> Checkpoint:
    """The checkpoint that will lie at `path`."""
    plain = plain_config(config)
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return Checkpoint(path, step, weight_version, plain, hash_of(plain), dict(versions), finite, dict(files))


def render(checkpoint: Checkpoint) -> bytes:
    """The text of the manifest."""
    data = {
        "format": FORMAT,
        "step": checkpoint.step,
        "weight_version": checkpoint.weight_version,
        "versions": dict(checkpoint.versions),
        "metrics": dict(checkpoint.metrics),
        "config_hash": checkpoint.config_hash,
        "config": dict(checkpoint.config),
        "files": {
            name: {"size": entry.size, "blake2b": entry.checksum} for name, entry in sorted(checkpoint.files.items())
        },
    }
    return (json.dumps({**data, "checksum": hash_of(data)}, indent=1, allow_nan=False) + "\n").encode()


def parse(path: Path, text: bytes) -> Checkpoint:
    """The checkpoint at `path` from its manifest. Raises `CorruptCheckpoint` or `NewerFormat`."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise CorruptCheckpoint(path, [f"{MANIFEST} can't be read: {error}"]) from error
    number = data.get("format") if isinstance(data, dict) else None
    if not isinstance(number, int):
        raise CorruptCheckpoint(path, [f"{MANIFEST} has no format number, so it is not a manifest of ours"])
    if number > FORMAT:
        raise NewerFormat(
            f"{path} has format {number}, and this version reads up to {FORMAT}; "
            "resume with the version that wrote it, or start a new run"
        )
    checksum = data.pop("checksum", None)
    if checksum != hash_of(data):
        raise CorruptCheckpoint(path, [f"{MANIFEST} has checksum {checksum}, its contents have {hash_of(data)}"])
    try:
        return Checkpoint(
            path,
            data["step"],
            data["weight_version"],
            data["config"],
            data["config_hash"],
            data["versions"],
            data["metrics"],
            {name: FileEntry(entry["size"], entry["blake2b"]) for name, entry in data["files"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(path, [f"{MANIFEST} lacks {error}"]) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
