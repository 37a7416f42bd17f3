"""Finding the answer in a text, and comparing two answers.

Extraction is strict: what isn't there is None, and never the whole text instead. Each text is extracted from once.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

Extract = Literal["last_number", "tag", "boxed", "hashes", "whole"]
Normalise = Literal["number", "text", "none"]

# A sign counts only where it can't be a minus between two terms: "10-4" ends in 4, "= -4" in -4. A leading point counts
# only where it can't be the end of a sentence or part of a version: ".5" is 0.5, "1.2.3" ends in 3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_QUOTES = " \t\r\n$\"'`*"
_STOPS = ".,;:!?"


def find_answer(text: str, how: Extract) -> str | None:
    r"""The answer in `text`, or None where there is none.

    `last_number`: the last number, its thousands separators removed. `tag`: inside the last `<answer>…</answer>`.
    `boxed`: inside the last `\boxed{…}`, braces balanced. `hashes`: the rest of the line after the last `####`, as
    GSM8K writes its answers. `whole`: all of the text. Surrounding blanks are removed.
    """
    match how:
        case "last_number":
            numbers = _NUMBER.findall(text.replace("−", "-"))
            return numbers[-1].replace(",", "") if numbers else None
        case "tag":
            contents = _TAG.findall(text)
            return contents[-1].strip() if contents else None
        case "boxed":
            return _last_box(text)
        case "hashes":
            _, found, rest = text.rpartition("####")
            return rest.strip().split("\n", 1)[0].strip() if found else None
        case "whole":
            return text.strip()


def _last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{…}`; a box inside a box belongs to the outer one's content."""
    last, position = None, 0
    while (start := text.find(r"\boxed{", position)) >= 0:
        content_start = start + len(r"\boxed{")
        depth, end = 1, content_start
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            break  # never closed: nothing after it can be complete at this level
        last, position = text[content_start : end - 1].strip(), end
    return last


def unbox(answer: str) -> str:
    r"""The content of an answer that is nothing but one `\boxed{…}`; any other answer as it is."""
    inner = _last_box(answer)
    return inner if inner is not None and answer.strip() == rf"\boxed{{{inner}}}" else answer


def equal(given: str, expected: str, normalise: Normalise) -> bool:
    """Whether two answers are the same.

    `none`: letter by letter. `text`: regardless of case, runs of blanks, and punctuation, quotes or `$` around it.
    `number`: by value where both are numbers ("1,000.0" is 1000), otherwise as `text`.
    """
    if normalise == "none":
        return given == expected
    if normalise == "number":
        values = _value(given), _value(expected)
        if None not in values:
            return values[0] == values[1]
    # What is nothing but punctuation has no plain form to compare.
    plain = _plain(given), _plain(expected)
    return plain[0] == plain[1] if all(plain) else given.strip() == expected.strip()


def _plain(text: str) -> str:
    return " ".join(text.strip(_QUOTES + _STOPS).casefold().split())


def _value(text: str) -> Decimal | None:
    text = text.replace("−", "-").strip(_QUOTES).rstrip(_QUOTES + _STOPS)
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
