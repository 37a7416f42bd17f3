"""The arithmetic of the weight sync's benchmark, from made-up measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf.weights.sync import SyncReport

# A script, started by its path, that imports what it shares as a script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))
import weight_sync


def report(seconds: float, paused: float) -> SyncReport:
    return SyncReport(1, 1000, seconds, {"begin": seconds - paused, "wire": 0.5}, paused)


def test_the_overhead_is_the_median_sync_over_the_sum_of_the_median_parts():
    reports = [report(3.0, 2.5), report(9.0, 8.0), report(3.3, 2.75)]
    case = weight_sync.figures(wires=[1.0, 7.0, 0.5], loads=[1.75, 2.0, 9.0], reports=reports)
    # Medians: w 1, l 2, t 3.3: 3.3 / (1 + 2).
    assert case["overhead_vs_parts"] == pytest.approx(1.1)
    assert case["w_over_t"] == pytest.approx(1.0 / 3.3)
    assert (case["w"], case["l"], case["t"], case["pause"], case["bytes"]) == (1.0, 2.0, 3.3, 2.75, 1000.0)
    # Medians of 0.5, 1 and 0.55.
    assert case["begin"] == pytest.approx(0.55)
    assert case["wire"] == 0.5


def test_the_tables_show_every_case_and_every_mode(capsys):
    case = weight_sync.figures([1.0], [2.0], [report(3.0, 2.5)])
    pause = {"without": {"seconds": 4.0}, "keep": {"seconds": 5.0, "begin": 0.25, "paused": 0.5}}
    whole, profile, modes = weight_sync.tables({"cases": {"float32, 1 engine": case}, "pause": {"float32": pause}})
    assert "| float32, 1 engine | 0.00 | 1.000 | 2.000 | 3.000 | 1.000 | 0.333 | 2.500 |" in whole
    assert profile.splitlines()[0].startswith("| case | begin | gather | cast | checksum | wire |")
    assert modes.splitlines()[2:] == ["| float32, without | 4.000 |  |  |", "| float32, keep | 5.000 | 0.250 | 0.500 |"]
