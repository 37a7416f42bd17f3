"""Rows of a prompt source: reasoning-gym problems, or the lines of a JSON Lines file.

Invariants
- Every row of a source is yielded or is part of the error: none is skipped.
- A row's id is a hash of its content, so it is the same in every run and epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.schema import JsonlPrompts, PromptSource, ReasoningGymPrompts
from rlhf.data.errors import DataError, listed
from rlhf.data.problems import generate

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands, its stable id, the prompt as text or chat messages, and the fields for rewards."""

    place: str
    prompt_id: str
    prompt: str | Sequence[Message]
    fields: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The user's prompt as text: of a conversation, the last message of the user."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next(str(m["content"]) for m in reversed(self.prompt) if m["role"] == "user")


def read_rows(source: PromptSource) -> list[Row]:
    """All rows of a source; raises `DataError` with what is wrong, and for a source without rows."""
    if isinstance(source, ReasoningGymPrompts):
        return list(_reasoning_gym(source))
    return _jsonl(source)


def content_hash(content: Any) -> str:
    """16 hexadecimal digits that depend on the content alone, not on the order of keys or on the process."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """What JSON has no form for. The order of a set differs between processes, so it is sorted."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _reasoning_gym(source: ReasoningGymPrompts) -> Iterator[Row]:
    for index, entry in enumerate(generate(source)):
        problem = {"task": source.task, "options": dict(source.options), "entry": entry}
        place = f"{source.task} problem {index}"
        yield Row(place, content_hash(problem), entry["question"], {**entry, "reasoning_gym": problem})


def _jsonl(source: JsonlPrompts) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in _lines(source.path):
        place = f"{source.path}:{number}"
        try:
            rows.append(_parse(line, place, source))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(f"{len(problems)} unusable lines in {source.path}:\n{listed(problems)}")
    if not rows:
        raise DataError(f"{source.path} has no lines: a prompt file has one JSON object on each")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, with their numbers from 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: bytes, place: str, source: JsonlPrompts) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text: byte {error.start + 1} of the line can't be read") from None
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a line must be a JSON object, not {type(row).__name__}")
    prompt = _field(row, source.prompt, place, "data.prompts.prompt")
    _check_prompt(prompt, f"{place}: field {source.prompt!r}")
    contents = dict(row)
    if source.answer is not None:
        contents["answer"] = _field(row, source.answer, place, "data.prompts.answer")
    return Row(place, content_hash(row), prompt, contents)


def _field(row: Mapping[str, Any], name: str, place: str, key: str) -> Any:
    if row.get(name) is None:
        state = "is null" if name in row else "is missing"
        raise DataError(f"{place}: field {name!r} ({key}) {state}; the line has {', '.join(map(repr, row)) or 'none'}")
    return row[name]


def _check_prompt(prompt: Any, what: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{what} is empty")
        _check_text(prompt, what)
        return
    if not isinstance(prompt, list):
        raise DataError(f"{what} must be text or a list of chat messages, not {type(prompt).__name__}")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{what}, message {index}: a message is an object with the texts 'role' and 'content'")
        _check_text(message["content"], f"{what}, message {index}")
    if not any(message["role"] == "user" and message["content"].strip() for message in prompt):
        raise DataError(f"{what} has no message of the user")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{what} ends with the assistant's message: the response is what is to be generated")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} holds {text[error.start]!r}, half of a surrogate pair, which no tokenizer takes"
        ) from error
