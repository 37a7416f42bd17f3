"""What a run writes: strict JSON Lines and one Parquet file a step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlhf.tracking.folder import RunFolderError
from rlhf.tracking.jsonlines import JsonLinesLog, MetricsLog, SpansLog
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
