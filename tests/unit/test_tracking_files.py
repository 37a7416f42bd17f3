"""What a run writes: strict JSON Lines and one Parquet file a step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlhf.config.schema import RunConfig
from rlhf.tracking.folder import RunFolder, RunFolderError
from rlhf.tracking.jsonlines import JsonLinesLog, MetricsLog, SpansLog
from rlhf.tracking.rewind import rewind
from rlhf.tracking.samples import TrajectoryRow, write_trajectories
from rlhf.tracking.spans import SpanRecorder
from rlhf.trajectories import Columns, Trajectory


def strict(line: str) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(line, parse_constant=refuse)


def test_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"reward/mean": 0.5, "weights/version": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5, "weights/version": 1}\n'
    log.write(2, {"reward/mean": 0.75})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1] == '{"step": 2, "reward/mean": 0.75}'


def test_log_opened_again_goes_on_at_the_end(tmp_path: Path) -> None:
    for step in (1, 2):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.write(step, {})
        log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_value_that_is_no_number_is_null_in_strict_json(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"policy/loss": value, "reward/mean": 1.0})
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "policy/loss": None, "reward/mean": 1.0}


def test_value_that_is_no_number_is_warned_of_once_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            log.write(step, {"policy/loss": float("nan")})
    assert [record.getMessage() for record in caplog.records] == [
        "metrics.jsonl: policy/loss is nan; written as null from now on"
    ]


def test_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m").write(1, {"a/b": np.float32(0.5), "a/c": np.int64(3)})
    assert strict((tmp_path / "m").read_text()) == {"step": 1, "a/b": 0.5, "a/c": 3.0}


def test_nested_rows_are_strict_too(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "evaluations.jsonl")
    log.append({"step": 0, "accuracy": 0.5, "rewards": [1.0, float("nan")], "by": {"match": None}, "text": "é"})
    expected = {"step": 0, "accuracy": 0.5, "rewards": [1.0, None], "by": {"match": None}, "text": "é"}
    assert strict((tmp_path / "evaluations.jsonl").read_text()) == expected


def test_spans_are_one_line_each(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    with recorder.span("step", step=1), recorder.span("rollout", step=1):
        pass
    SpansLog(tmp_path / "spans.jsonl").write(recorder.drain())
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["rollout", "step"]
    assert lines[0]["parent"] == lines[1]["span_id"]


def test_full_disk_is_an_error_that_names_file_reason_and_remedy() -> None:
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(RunFolderError, match=r"cannot write /dev/full: No space left on device; free space or set run"):
        log.write(1, {"reward/mean": 1.0})
    log.close()  # and closing does not fail again


def row(index: int = 0, reward: float | None = 1.0, **by_function: float | None) -> TrajectoryRow:
    header = Trajectory(
        prompt_id="p7",
        group_id=12,
        sample_index=index,
        prompt_tokens=2,
        response_tokens=2,
        finish_reason="stop",
        weight_version=4,
        engine=1,
    )
    header = header.with_reward(reward, by_function).with_advantage(-0.5)
    return TrajectoryRow.of(
        header, Columns.from_completion((5, 6), [7, 8], [-0.5, -1.0], 4), prompt="1 + 1 =", response=" 2"
    )


def test_trajectories_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    write_trajectories(path, [row(match=1.0)])
    (read,) = pq.read_table(path).to_pylist()
    logprobs = read.pop("logprobs")
    assert np.isnan(logprobs[:2]).all() and logprobs[2:] == [-0.5, -1.0]
    assert read == {
        "sample_id": "12-0",
        "group_id": 12,
        "prompt_id": "p7",
        "sample_index": 0,
        "prompt": "1 + 1 =",
        "response": " 2",
        "token_ids": [5, 6, 7, 8],
        "loss_mask": [False, False, True, True],
        "finish_reason": "stop",
        "weight_version": 4,
        "engine": 1,
        "reward": 1.0,
        "advantage": -0.5,
        "reward/match": 1.0,
    }


def test_each_function_of_any_row_has_a_column_and_failures_are_null(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    write_trajectories(path, [row(0, 1.0, a=1.0), row(1, None, a=None, b=2.0)])
    table = pq.read_table(path)
    assert table.column("reward/a").to_pylist() == [1.0, None]
    assert table.column("reward/b").to_pylist() == [None, 2.0]
    assert table.column("reward").to_pylist() == [1.0, None]


def test_types_do_not_depend_on_the_rows(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "none", [])
    write_trajectories(tmp_path / "unscored", [row(reward=None)])
    assert pq.read_schema(tmp_path / "none") == pq.read_schema(tmp_path / "unscored")


def test_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    path = tmp_path / "step.parquet"
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        write_trajectories(path, [row()])
    assert list(tmp_path.iterdir()) == []


def test_sync_brings_lines_to_the_disk_and_names_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {})
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    log.sync()
    assert synced == [str(tmp_path / "metrics.jsonl")]

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: No space left"):
        log.sync()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was killed in step 4: it has three lines of metrics, and a fourth that is torn."""
    folder = RunFolder.open(RunConfig(name="try", dir=tmp_path))
    metrics = MetricsLog(folder.metrics_jsonl)
    spans = JsonLinesLog(folder.spans_jsonl)
    spans.append({"name": "start", "step": None, "start": 0.0, "end": 9.0})
    for step in (1, 2, 3):
        metrics.write(step, {"reward/mean": step / 10})
        # Step 1 takes from 10 to 20, step 2 from 20 to 30, step 3 from 30 to 40.
        spans.append({"name": "update", "step": step, "start": 10.0 * step + 1, "end": 10.0 * step + 8})
        spans.append({"name": "step", "step": step, "start": 10.0 * step, "end": 10.0 * (step + 1)})
        (folder.trajectories / f"step-{step:06d}.parquet").write_text("samples")
    spans.append({"name": "probe", "step": None, "start": 32.0, "end": 33.0})
    for step in (2, 4):  # what was killed while it was written, now or long ago
        (folder.trajectories / f"step-{step:06d}.parquet.partial").write_text("half")
    JsonLinesLog(folder.evaluations_jsonl).append({"step": 0, "eval/accuracy": 0.1}, {"step": 2, "eval/accuracy": 0.2})
    for path in (folder.metrics_jsonl, folder.spans_jsonl):
        with path.open("a") as file:
            file.write('{"step": 4, "na')
    return folder


def lines(path: Path) -> list[Any]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def column(path: Path, name: str) -> list[Any]:
    return [line[name] for line in lines(path)]


def test_rewinding_leaves_each_step_up_to_the_given_one_and_nothing_later(folder: RunFolder) -> None:
    kept = folder.metrics_jsonl.read_text().splitlines(keepends=True)[:2]
    rewind(folder, 2)
    assert folder.metrics_jsonl.read_text() == "".join(kept)
    assert column(folder.evaluations_jsonl, "step") == [0, 2]
    assert column(folder.spans_jsonl, "step") == [None, 1, 1, 2, 2]
    assert sorted(path.name for path in folder.trajectories.iterdir()) == [
        "step-000001.parquet",
        "step-000002.parquet",
    ]
    # The run goes on: each step is there once.
    log = MetricsLog(folder.metrics_jsonl)
    for step in (3, 4):
        log.write(step, {})
    assert column(folder.metrics_jsonl, "step") == [1, 2, 3, 4]


def test_a_torn_last_line_goes_also_where_no_step_does(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rewind(folder, 3)
    assert column(folder.metrics_jsonl, "step") == [1, 2, 3]
    assert "metrics.jsonl: 1 lines that are not whole were left out" in caplog.text


def test_a_last_line_that_lacks_only_its_end_stays(folder: RunFolder) -> None:
    folder.metrics_jsonl.write_text('{"step": 1}\n{"step": 2}')
    rewind(folder, 2)
    assert folder.metrics_jsonl.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("step", "names"),
    # The probe, of no step, began at 32, when step 3 (30 to 40) was under way; the start began before all steps.
    [(3, ["start", "probe"]), (2, ["start"]), (1, ["start"]), (0, []), (None, [])],
)
def test_a_span_without_a_step_stays_when_it_began_before_the_last_kept_step_ended(
    folder: RunFolder, step: int | None, names: list[str]
) -> None:
    rewind(folder, step)
    assert [line["name"] for line in lines(folder.spans_jsonl) if line["step"] is None] == names


def test_a_beginning_keeps_nothing_and_step_0_keeps_the_evaluation_before_training(folder: RunFolder) -> None:
    rewind(folder, 0)
    assert (column(folder.evaluations_jsonl, "step"), lines(folder.metrics_jsonl)) == ([0], [])
    rewind(folder, None)
    assert lines(folder.evaluations_jsonl) == []
    assert list(folder.trajectories.iterdir()) == []


def test_rewinding_twice_is_rewinding_once_and_touches_no_file_again(folder: RunFolder) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = (path for path in folder.path.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_ino, path.read_bytes()) for path in files}

    rewind(folder, 2)
    before = state()
    rewind(folder, 2)
    assert state() == before


def test_what_the_run_did_not_write_stays(folder: RunFolder) -> None:
    for name in ("step-9.csv", "notes.txt", "my-step-000009.parquet"):
        (folder.trajectories / name).write_text("")
    rewind(folder, None)
    assert sorted(path.name for path in folder.trajectories.iterdir()) == [
        "my-step-000009.parquet",
        "notes.txt",
        "step-9.csv",
    ]


def test_a_folder_without_logs_has_nothing_to_rewind(tmp_path: Path) -> None:
    folder = RunFolder.open(RunConfig(name="new", dir=tmp_path))
    rewind(folder, None)
    assert sorted(path.name for path in folder.path.iterdir() if path.is_file()) == [".rlhf-run"]


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_rewind_that_fails_leaves_the_file_as_it_was(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = folder.metrics_jsonl.read_bytes()
    monkeypatch.setattr(os, call, _full)
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        rewind(folder, 1)
    assert folder.metrics_jsonl.read_bytes() == before
    assert not list(folder.path.glob(".metrics*"))


def _full(*_: object) -> None:
    raise OSError(28, os.strerror(28))
