"""The run folder: claimed by one process, and nothing deleted that isn't a run's."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhf.config.schema import RunConfig
from rlhf.tracking.folder import MARKER, RunExists, RunFolder, RunFolderError


def run(directory: Path, if_exists: str = "refuse", name: str = "try") -> RunConfig:
    return RunConfig.model_validate({"name": name, "dir": directory, "if_exists": if_exists})


def test_new_folder_has_the_designs_names(tmp_path: Path) -> None:
    folder = RunFolder.open(run(tmp_path / "deep" / "runs"))
    root = tmp_path / "deep" / "runs" / "try"
    assert folder.path == root
    assert [folder.config_yaml, folder.metrics_jsonl, folder.spans_jsonl, folder.evaluations_jsonl] == [
        root / "config.yaml",
        root / "metrics.jsonl",
        root / "spans.jsonl",
        root / "evaluations.jsonl",
    ]
    assert (folder.trajectories, folder.export) == (root / "trajectories", root / "export")
    assert folder.logs.is_dir() and folder.trajectories.is_dir()


def test_relative_dir_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open(run(Path("runs"))).path == tmp_path.resolve() / "runs" / "try"


def test_existing_folder_is_refused_with_the_remedies(tmp_path: Path) -> None:
    (tmp_path / "try").mkdir()
    with pytest.raises(RunExists) as refused:
        RunFolder.open(run(tmp_path))
    for part in (str(tmp_path / "try"), "another run.name", "run.if_exists=resume", "run.if_exists=replace"):
        assert part in str(refused.value)


def test_replace_empties_the_folder_of_a_run(tmp_path: Path) -> None:
    first = RunFolder.open(run(tmp_path))
    first.metrics_jsonl.write_text("{}\n")
    (first.trajectories / "step-000001.parquet").write_text("")
    first.close()
    second = RunFolder.open(run(tmp_path, "replace"))
    left = sorted(str(entry.relative_to(second.path)) for entry in second.path.rglob("*"))
    assert left == [MARKER, "logs", "trajectories"]


def test_replace_takes_an_empty_folder_and_one_with_the_runs_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.open(run(tmp_path, "replace", "empty"))
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "config.yaml").write_text("run: {name: copied}\n")
    folder = RunFolder.open(run(tmp_path, "replace", "copied"))
    assert not folder.config_yaml.exists()


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.yaml": "database: {host: db1}\n"},
        {"config.yaml": "run: {name: other}\n"},
        {"config.yaml": "[not, a, mapping]"},
        {"config.yaml": "run: [unclosed"},
    ],
)
def test_replace_deletes_nothing_in_a_folder_that_is_not_a_runs(tmp_path: Path, files: dict[str, str]) -> None:
    victim = tmp_path / "try"
    victim.mkdir()
    for name, text in files.items():
        (victim / name).write_text(text)
    with pytest.raises(RunFolderError, match="nothing was deleted"):
        RunFolder.open(run(tmp_path, "replace"))
    assert {entry.name: entry.read_text() for entry in victim.iterdir()} == files


def test_resume_claims_a_runs_folder_as_it_is(tmp_path: Path) -> None:
    first = RunFolder.open(run(tmp_path))
    first.metrics_jsonl.write_text('{"step": 1}\n')
    (first.trajectories / "step-000001.parquet").write_text("samples")
    (first.checkpoints / "step-000001").mkdir(parents=True)
    before = sorted(first.path.rglob("*"))
    first.close()
    RunFolder.check(run(tmp_path, "resume"))
    second = RunFolder.open(run(tmp_path, "resume"))
    assert sorted(second.path.rglob("*")) == before
    assert second.metrics_jsonl.read_text() == '{"step": 1}\n'
    with pytest.raises(RunExists, match="in use by process"):
        RunFolder.open(run(tmp_path, "resume"))


def test_resume_makes_a_folder_that_does_not_exist_and_fills_in_what_an_early_death_left_out(tmp_path: Path) -> None:
    RunFolder.check(run(tmp_path, "resume"))
    assert RunFolder.open(run(tmp_path, "resume")).logs.is_dir()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / MARKER).write_text("")
    folder = RunFolder.open(run(tmp_path, "resume", "early"))
    assert folder.logs.is_dir() and folder.trajectories.is_dir()


def test_resume_does_not_go_on_in_a_folder_that_is_not_a_runs(tmp_path: Path) -> None:
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"run\.if_exists=resume: .*try is not the folder of a run"):
        RunFolder.check(run(tmp_path, "resume"))
    with pytest.raises(RunFolderError, match=r"nothing was deleted or changed; choose another run\.name or run\.dir$"):
        RunFolder.open(run(tmp_path, "resume"))
    assert [entry.name for entry in (tmp_path / "try").iterdir()] == ["thesis.tex"]


def test_replace_does_not_follow_a_link_out_of_the_runs(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    RunFolder.open(run(tmp_path, name="elsewhere")).close()
    (tmp_path / "try").symlink_to(elsewhere)
    with pytest.raises(RunFolderError, match="nothing was deleted"):
        RunFolder.open(run(tmp_path, "replace"))
    assert (elsewhere / "logs").is_dir()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", ".hidden"])
def test_name_that_leaves_the_run_dir_is_refused_by_the_schema(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        run(tmp_path, "replace", name)


def test_one_of_many_that_race_for_a_name_wins(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    outcomes: list[RunFolder | RunExists] = []

    def race(if_exists: str) -> None:
        start.wait()
        try:
            outcomes.append(RunFolder.open(run(tmp_path, if_exists)))
        except RunExists as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(mode,)) for mode in ("refuse", "replace", "resume", "resume") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8
    assert sum(isinstance(outcome, RunFolder) for outcome in outcomes) == 1


def test_folder_of_a_process_that_runs_is_not_replaced_and_that_of_a_killed_one_is(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from rlhf.config.schema import RunConfig\n"
        "from rlhf.tracking.folder import RunFolder\n"
        "folder = RunFolder.open(RunConfig(name='try', dir=pathlib.Path(sys.argv[1])))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(RunExists, match=f"in use by process {other.pid} on "):
            RunFolder.open(run(tmp_path, "replace"))
        assert (tmp_path / "try" / "logs").is_dir()
    finally:
        other.kill()
        other.communicate()
    assert RunFolder.open(run(tmp_path, "replace")).path == tmp_path / "try"


def test_run_dir_that_cannot_be_made_is_named_with_reason_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*file/runs/try: Not a directory; .*run\.dir"):
        RunFolder.open(run(tmp_path / "file" / "runs"))


def test_unwritable_run_dir_is_named_with_reason_and_remedy() -> None:
    # The kernel refuses new folders here also for root, for whom file modes are no obstacle.
    with pytest.raises(RunFolderError, match=r"cannot write /proc/runs/try: .*run\.dir"):
        RunFolder.open(run(Path("/proc/runs")))
