"""Append-only JSON Lines files: `metrics.jsonl`, `spans.jsonl`, `evaluations.jsonl`.

A line is in the file when `append` returns, so a run that is killed leaves every line it reported; it survives the end
of the machine when `sync` has returned, which comes before a checkpoint that counts on it. What is written is
strict JSON: NaN and the infinities, which JSON has no word for, become `null`, and a warning names the key once.
(Absent would say that the metric doesn't apply; it does, and its value is not a number.)
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.tracking.folder import explain_write
from rlhf.tracking.spans import Span

_log = logging.getLogger(__name__)


class JsonLinesLog:
    """Appends mappings to a file, one line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned: set[str] = set()
        with explain_write(path):
            # Unbuffered: after a failed write nothing is left behind that would fail again when the file is closed.
            self._file = path.open("ab", buffering=0)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write the rows. Raises `RunFolderError` when the disk is full."""
        lines = [json.dumps(self._strict(row, ""), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        rest = memoryview("".join(lines).encode())
        with explain_write(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Bring all lines to the disk. Raises `RunFolderError`."""
        with explain_write(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _strict(self, value: Any, key: str) -> Any:
        """The value as strict JSON can hold it; `key` names it in the warning."""
        if isinstance(value, Mapping):
            return {str(k): self._strict(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._strict(v, key) for v in value]
        if value is None or isinstance(value, str | bool | int):
            return value
        number = float(value)  # NumPy's scalars as well
        if math.isfinite(number):
            return number
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s: %s is %s; written as null from now on", self.path.name, key, number)
        return None


class MetricsLog(JsonLinesLog):
    """`metrics.jsonl`: one line a step, `step` first."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        self.append({"step": step, **metrics})


class SpansLog(JsonLinesLog):
    """`spans.jsonl`: one line a span."""

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans that were drained."""
        self.append(*(span.as_dict() for span in spans))
