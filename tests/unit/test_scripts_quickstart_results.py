"""The README's results table, from made-up run folders with numbers that can be averaged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import quickstart_results

REWARDS = [0.1, 0.2, 0.2, 0.2, 0.3, 0.9, 0.4, 0.5, 0.6, 0.7, 0.8]


def _write_run(
    folder: Path, *, seed: int = 1, learning_rate: float = 1e-5, rewards: list[float] = REWARDS, evaluations: int = 2
) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{seed: {seed}}}\npolicy: {{learning_rate: {learning_rate}}}\n")
    steps = [
        {"step": step, "reward/mean": reward, "time/step": 10.0 + step} for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    results = [
        {"step": 0, "eval/accuracy": 0.1875, "eval/problems": 64.0},
        {"step": 11, "eval/accuracy": 0.5, "eval/problems": 64.0},
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results[:evaluations]))
    return folder


def test_row_averages_the_first_and_the_last_five_steps(tmp_path: Path) -> None:
    row = quickstart_results.read_run(_write_run(tmp_path / "run", seed=3))
    assert row.seed == 3
    assert row.steps == 11
    assert row.first == pytest.approx(0.2)  # (0.1 + 0.2 + 0.2 + 0.2 + 0.3) / 5; the sixth, 0.9, is in neither
    assert row.last == pytest.approx(0.6)  # (0.4 + 0.5 + 0.6 + 0.7 + 0.8) / 5
    assert (row.before, row.after, row.problems) == (0.1875, 0.5, 64)
    assert row.seconds_per_step == 16.0  # the median of 11 .. 21


def test_table_lists_seeds_in_order_and_the_control_last(tmp_path: Path) -> None:
    folders = [
        _write_run(tmp_path / "control", learning_rate=0.0, rewards=[0.2] * 10),
        _write_run(tmp_path / "b", seed=2),
        _write_run(tmp_path / "a", seed=1),
    ]
    table = quickstart_results.render([quickstart_results.read_run(folder) for folder in folders])
    rows = [line for line in table.splitlines() if line.startswith("| seed")]
    assert rows == [
        "| seed 1 | 0.200 | 0.600 | +0.400 | 18.8% | 50.0% | 16.0 s |",
        "| seed 2 | 0.200 | 0.600 | +0.400 | 18.8% | 50.0% | 16.0 s |",
        "| seed 1, learning rate 0 (control) | 0.200 | 0.200 | +0.000 | 18.8% | 50.0% | 15.5 s |",
    ]


def test_table_replaces_what_stands_between_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- quickstart-results -->\nold\n<!-- /quickstart-results -->\nafter\n")
    run = _write_run(tmp_path / "run")
    for _ in range(2):  # again gives the same file
        assert quickstart_results.main([str(run), "--write", str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- quickstart-results -->\n| run |")
        assert text.endswith("\n<!-- /quickstart-results -->\nafter\n")
        assert "old" not in text
        assert text.count("| seed 1 |") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": [0.2] * 9}, "has 9 steps; the table needs 10 or more"),
        ({"evaluations": 1}, "has 1 evaluations; the table needs one before and one after"),
    ],
)
def test_unfinished_run_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object], message: str
) -> None:
    run = _write_run(tmp_path / "run", **settings)  # type: ignore[arg-type]
    assert quickstart_results.main([str(run)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(run) in error


def test_folder_that_is_not_a_run_and_readme_without_markers_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart_results.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere/config.yaml can't be read" in capsys.readouterr().err
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    assert quickstart_results.main([str(_write_run(tmp_path / "run")), "--write", str(readme)]) == 1
    assert "lacks the markers" in capsys.readouterr().err
    assert readme.read_text() == "nothing here\n"
