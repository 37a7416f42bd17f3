"""The other ways to start a run: the quickstart script, the Python API, and Ray jobs."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from rlhf.cluster.ports import free_port
from tests.e2e.command import ROOT, RUN_S, tiny_config
from tests.tiny import make_tiny_model


def run(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, stdin=subprocess.DEVNULL, check=False, **settings
    )  # type: ignore[call-overload,no-any-return]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_quickstart_script_trains(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", with_template=True)
    overrides = [f"model.path={model}", f"run.dir={tmp_path}", "run.steps=2", "rollout.kv_cache_bytes=67108864"]
    done = run(["bash", str(ROOT / "scripts" / "quickstart.sh"), *overrides])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics_of(tmp_path / "quickstart")] == [1, 2]
    evaluations = (tmp_path / "quickstart" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["eval/problems"] for line in evaluations] == [64, 64]


def test_the_example_with_a_reward_function_from_python_trains_on_it(tiny_untied: Path, tmp_path: Path) -> None:
    file = tmp_path / "brevity.yaml"
    # ReMax: a greedy response to each prompt is the baseline. It is no sample, and so not in the ledger.
    config = tiny_config(tiny_untied, tmp_path, "brevity") | {"algorithm": {"advantage": "remax"}}
    file.write_text(yaml.safe_dump(config))
    done = run([sys.executable, str(ROOT / "examples" / "custom_reward.py"), "--config", str(file), "run.steps=1"])
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = metrics_of(tmp_path / "brevity")
    assert line["reward/brevity/mean"] < 0
    assert line["reward/brevity/characters"] > 0
    # The weighted sum of both functions trains.
    both = line["reward/brevity/mean"] + line["reward/rewards.py:digits/mean"]
    assert line["reward/mean"] == pytest.approx(both)
    assert line["ledger/drawn"] == line["ledger/trained"] == 12
    assert line["policy/grad_norm"] > 0


def test_the_example_with_an_algorithm_from_python_trains_with_it(tiny_untied: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(tiny_config(tiny_untied, tmp_path, "own")))
    done = run([sys.executable, str(ROOT / "examples" / "custom_algorithm.py"), "--config", str(file), "run.steps=1"])
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = metrics_of(tmp_path / "own")
    # Two updates: in the second the ratio has left 1.
    assert line["policy/grad_norm"] > 0 and line["policy/ratio_max"] > 1.0
    table = pq.read_table(tmp_path / "own" / "trajectories" / "step-000001.parquet").to_pylist()
    for group in {row["group_id"] for row in table}:
        rows = [row for row in table if row["group_id"] == group]
        middle = statistics.median(row["reward"] for row in rows)
        assert [row["advantage"] for row in rows] == pytest.approx([row["reward"] - middle for row in rows])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray head with token authentication, started as a user would; yields the client's environment."""
    folder = tmp_path_factory.mktemp("ray")
    dashboard, gcs, agent = free_port(), free_port(), free_port()
    token = folder / "token"
    token.write_text("a" * 32)
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=4"),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", "--disable-usage-stats"),
        # The agent takes jobs, if it gets its port: another session of this machine may have the default one.
        *(f"--dashboard-agent-listen-port={agent}", "--include-dashboard=true", "--object-store-memory=200000000"),
    ]
    log = (folder / "head.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        # A head that answers may still be without the agent that jobs are given to.
        nothing = [command[0], "job", "submit", "--", "true"]
        while (tried := run(nothing, env=environment)).returncode != 0:
            told = tried.stdout + tried.stderr + (folder / "head.log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, told
            time.sleep(1)
        yield environment
    finally:
        tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in tree:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def submit(head: dict[str, str], *arguments: str, entry: list[str]) -> subprocess.CompletedProcess[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    return run([ray, "job", "submit", *arguments, "--", sys.executable, "-m", "rlhf.train", *entry], env=head)


def test_a_job_trains_on_a_running_head(head: dict[str, str], tiny_untied: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(tiny_config(tiny_untied, tmp_path / "runs", "job")))
    done = submit(head, entry=["--config", str(file), "run.steps=1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics_of(tmp_path / "runs" / "job")) == 1
    assert "joined the Ray cluster" in done.stdout


def test_a_job_with_an_uploaded_folder_trains_and_leaves_its_run_outside(
    head: dict[str, str], tiny_untied: Path, tmp_path: Path
) -> None:
    upload = tmp_path / "upload"
    upload.mkdir()
    (upload / "job.yaml").write_text(yaml.safe_dump(tiny_config(tiny_untied, tmp_path / "runs", "uploaded")))
    done = submit(head, "--working-dir", str(upload), entry=["--config", "job.yaml", "run.steps=1"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics_of(tmp_path / "runs" / "uploaded")) == 1


def test_a_relative_run_dir_inside_an_upload_is_refused_with_the_reason(
    head: dict[str, str], tiny_untied: Path, tmp_path: Path
) -> None:
    upload = tmp_path / "upload"
    upload.mkdir()
    config = tiny_config(tiny_untied, Path("runs"), "relative")
    (upload / "job.yaml").write_text(yaml.safe_dump(config))
    done = submit(head, "--working-dir", str(upload), entry=["--config", "job.yaml"])
    assert done.returncode != 0
    assert "run.dir" in done.stdout + done.stderr and "deletes" in done.stdout + done.stderr


def test_a_cluster_with_too_few_slots_is_refused_with_the_numbers(
    head: dict[str, str], tiny_untied: Path, tmp_path: Path
) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(yaml.safe_dump(tiny_config(tiny_untied, tmp_path / "runs", "large")))
    done = submit(head, entry=["--config", str(file), "policy.ranks=3", "rollout.engines=2"])
    assert done.returncode != 0
    assert "policy" in done.stdout and "5" in done.stdout and "4" in done.stdout
    assert not (tmp_path / "runs" / "large").exists()
