"""Peaks of memory by phase, of this very process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.learners import memory
from rlhf.learners.memory import PhasePeaks

MIB = 1 << 20
CPU = torch.device("cpu")


def allocate(mib: int) -> None:
    """Touch memory that is given back at once."""
    torch.ones(mib * MIB, dtype=torch.uint8)


def test_peak_is_that_of_its_own_phase() -> None:
    # 256 MiB, far above what else this process does meanwhile. Memory is given back before the phase ends.
    peaks = PhasePeaks(CPU)
    with peaks.phase("before"):
        pass
    with peaks.phase("large"):
        allocate(256)
    with peaks.phase("after"):
        pass
    found = peaks.take()
    assert 250 * MIB < found["large"] - found["before"] < 300 * MIB
    assert abs(found["after"] - found["before"]) < 50 * MIB


def test_largest_peak_of_a_phase_that_recurs_counts() -> None:
    peaks = PhasePeaks(CPU)
    for mib in (128, 256, 0):
        with peaks.phase("update"):
            allocate(mib)
    with peaks.phase("idle"):
        pass
    found = peaks.take()
    assert found["update"] - found["idle"] > 250 * MIB


def test_phase_that_raises_has_a_peak() -> None:
    peaks = PhasePeaks(CPU)
    with pytest.raises(ZeroDivisionError), peaks.phase("update"):
        raise ZeroDivisionError
    assert peaks.take()["update"] > 0


def test_peaks_are_handed_out_once() -> None:
    peaks = PhasePeaks(CPU)
    with peaks.phase("update"):
        pass
    assert list(peaks.take()) == ["update"]
    assert peaks.take() == {}


def test_kernel_that_keeps_its_peak_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    peaks = PhasePeaks(CPU)
    with peaks.phase("update"):
        pass
    assert peaks.take() == {}
