"""A run folder taken back to a step, so that after a resume its files hold each step once.

Invariants
- Lines of steps up to the given one stay, byte for byte; later ones, and the torn last line of a process that was
  killed, go.
- A span that belongs to no step (a start, a probe) stays when it began before the last kept step ended.
- Each file is replaced whole. A process that is killed in here leaves files of which some are cut; cutting again gives
  the same.
- Only what a run writes is touched: its three logs and `trajectories/step-*.parquet`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.cluster.disk import sync_folder
from rlhf.tracking.folder import RunFolder, explain_write

Line = Mapping[str, Any]

_TRAJECTORIES = re.compile(r"step-(\d+)\.parquet(\.partial)?")
_log = logging.getLogger(__name__)


def rewind(folder: RunFolder, step: int | None) -> None:
    """Remove what the run wrote of steps after `step`; with None, of all steps. Raises `RunFolderError`.

    For the time before the first append of the process that resumes. None is for a run that begins anew in its folder:
    an evaluation of step 0 goes as well.
    """
    limit = -1 if step is None else step
    for path in (folder.metrics_jsonl, folder.evaluations_jsonl):
        _keep_lines(path, lambda line: _step_of(line, math.inf) <= limit)
    end = _end_of_step(folder.spans_jsonl, limit)
    _keep_lines(folder.spans_jsonl, lambda line: _belongs(line, limit, end))
    _remove_trajectories(folder.trajectories, limit)


def _belongs(span: Line, limit: int, end: float) -> bool:
    if span.get("step") is None:
        return float(span.get("start", math.inf)) <= end
    return _step_of(span, math.inf) <= limit


def _step_of(line: Line, otherwise: float) -> float:
    step = line.get("step")
    return step if isinstance(step, int) else otherwise


def _end_of_step(path: Path, limit: int) -> float:
    """When the last kept step ended, in seconds since the epoch; before all time where no step is kept."""
    ends = (
        float(line.get("end", -math.inf))
        for _, line in _lines(path)
        if line is not None and line.get("name") == "step" and _step_of(line, math.inf) <= limit
    )
    return max(ends, default=-math.inf)


def _keep_lines(path: Path, keep: Callable[[Line], bool]) -> None:
    """Replace the file by one with only the lines to keep; nothing happens where it would be the same."""
    aside = path.with_name(f".{path.name}.rewound")
    with explain_write(path):
        if not path.exists():
            return
        try:
            if _copy(path, aside, keep):
                os.replace(aside, path)
                sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def _copy(path: Path, aside: Path, keep: Callable[[Line], bool]) -> bool:
    """Copy the lines to keep, and say whether the copy differs."""
    torn, changed = 0, False
    with aside.open("wb") as rest:
        for raw, line in _lines(path):
            torn += line is None
            stays = line is not None and keep(line)
            # A line may be whole but for its end: the process was killed between two writes.
            whole = raw.removesuffix(b"\n") + b"\n"
            changed |= not stays or raw != whole
            if stays:
                rest.write(whole)
        rest.flush()
        os.fsync(rest.fileno())
    if torn:
        _log.warning("%s: %d lines that are not whole were left out", path, torn)
    return changed


def _lines(path: Path) -> Iterator[tuple[bytes, Line | None]]:
    """Every line with what it says; None for one that is torn."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                line = None
            yield raw, line if isinstance(line, dict) else None


def _remove_trajectories(folder: Path, limit: int) -> None:
    with explain_write(folder):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _TRAJECTORIES.fullmatch(path.name)
            if match and (match[2] or int(match[1]) > limit):
                path.unlink()
