"""What can be told of a checkpoint from its files' headers, without torch and before anything starts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLASSIFIER = "ForSequenceClassification"
HEAD = "score.weight"
_INDEX = "model.safetensors.index.json"
# A header of this size describes a million tensors; a larger number is not a length but another kind of file.
_MAX_HEADER_BYTES = 100 << 20


def check_reward_checkpoint(path: str) -> str | None:
    """What is wrong with a local reward model, with the remedy; None when nothing is, or when it can't be told here.

    Reads `config.json` and the headers of the safetensors files. A hub name, and weights in another format, can't be
    told; they are checked once more when they are loaded.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith(".") or len(folder.parts) > 2:
            return f"{path}: no such folder. Give the folder of a sequence-classification model"
        return None
    try:
        config = _read_json(folder / "config.json")
        shapes = _tensor_shapes(folder)
    except (OSError, ValueError) as error:
        return f"{path}: can't be read: {error}. Save the model again"
    return _wrong_architecture(path, config) or _wrong_head(path, config, shapes)


def compare_tokenizers(path: str, policy: str) -> str | None:
    """What keeps the model at `path` from reading the policy's token ids; None when nothing does, or it can't be told.

    Every token of the policy's `tokenizer.json` has to have the same id in the other one, which may have more. Ids are
    never turned into text and back on the way to a reward model, so another tokenizer would read another text.
    """
    mine, theirs = (_vocabulary(Path(folder) / "tokenizer.json") for folder in (path, policy))
    if mine is None or theirs is None:
        return None
    different = sorted((index, token) for token, index in theirs.items() if mine.get(token) != index)
    if not different:
        return None
    index, token = different[0]
    return (
        f"{path}: its tokenizer has another id than {policy} for {len(different)} tokens: {token!r} is {index} there "
        f"and {mine.get(token, 'absent')} here. Give a reward model with the policy's tokenizer"
    )


def matrix_names(path: str) -> list[str] | None:
    """Names, without `.weight`, of all weights with two axes in the safetensors files of a folder.

    None for a hub name, for weights in another format, and for files that can't be read.
    """
    try:
        shapes = _tensor_shapes(Path(path))
    except (OSError, ValueError):
        return None
    if shapes is None:
        return None
    return [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]


def _wrong_architecture(path: str, config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures") or []
    if architectures and not any(str(name).endswith(CLASSIFIER) for name in architectures):
        return (
            f"{path}: its architecture is {', '.join(map(str, architectures))}, whose score head would be random. "
            f"Give a model of a class that ends in {CLASSIFIER}"
        )
    return None


def _wrong_head(path: str, config: Mapping[str, Any], shapes: Mapping[str, list[int]] | None) -> str | None:
    if shapes is not None and HEAD not in shapes:
        alike = sorted(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == 1)
        hint = f"it has {', '.join(alike[:3])}" if alike else "it has no tensor with one output"
        return (
            f"{path}: no tensor {HEAD} ({hint}), so the score head would be random. Give a checkpoint that has its "
            "head under this name"
        )
    # transformers writes labels only where they are not its default of two.
    labels = shapes[HEAD][0] if shapes is not None else len(config.get("id2label") or (0, 1))
    if labels != 1:
        return f"{path}: num_labels is {labels}: a score is one number. Give a model with num_labels 1"
    return None


def _tensor_shapes(folder: Path) -> dict[str, list[int]] | None:
    """Shapes of all tensors in the folder's safetensors files, by name; None when there are no such files."""
    index = folder / _INDEX
    if index.is_file():
        files = sorted({folder / str(name) for name in _read_json(index)["weight_map"].values()})
    else:
        files = [file for file in [folder / "model.safetensors"] if file.is_file()]
    if not files:
        return None
    return {
        name: list(entry["shape"])
        for file in files
        for name, entry in _safetensors_header(file).items()
        if name != "__metadata__"
    }


def _safetensors_header(file: Path) -> dict[str, Any]:
    """The JSON at the start of a safetensors file, after 8 bytes with its length, little-endian."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        header: Any = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is not a safetensors file")
    return header


def _vocabulary(file: Path) -> dict[str, int] | None:
    """Ids by token of a `tokenizer.json`, added tokens included; None when there is none or it has another form."""
    try:
        content = _read_json(file)
    except (OSError, ValueError):
        return None
    vocabulary = (content.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    return {**vocabulary, **added}


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds {type(content).__name__}, not an object")
    return content
