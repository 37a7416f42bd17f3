"""Whatever is killed, and whenever: `scripts/chaos.py` with few kills; its longer run is in docs/reliability.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
KILLS = 4


@pytest.mark.timeout(1800)
def test_a_run_recovers_from_a_kill_in_each_of_four_phases_and_loses_nothing(tiny_untied: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", str(KILLS), "--seed", "3", "--model", str(tiny_untied)]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kills"] == len(said["phases"]) == KILLS
    assert said["broken"] == ""
    # Beyond the kills the run went on, and what it did twice is counted.
    assert said["steps"] > KILLS
    assert said["redone"] % 16 == 0
