"""The benchmarks' arithmetic and fairness, from made-up runs; nothing here starts an engine or trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.config import Config
from rlhf.rollout.pool import RolloutPool
from rlhf.rollout.types import Completion, GenerationRequest
from rlhf.trajectories import Prompt, PromptDraw

# They are scripts, started by their path, and import what they share as a script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))
import common
import rollout
import step_time


def _span(step: int, name: str, start: float, end: float, role: str = "policy") -> dict[str, Any]:
    return {"name": name, "role": role, "step": step, "start": start, "end": end}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """One step of 10 s: rollout 3, score 0.5, assemble 0.25, update 5, sync 1, account 0.125; 0.125 is left."""
    metrics = {
        "step": 1,
        "time/step": 10.0,
        "time/rollout": 3.0,
        "time/score": 0.5,
        "time/assemble": 0.25,
        "time/update": 5.0,
        "time/sync": 1.0,
        "time/account": 0.125,
        "time/other": 0.125,
        "busy/policy": 4.75,
        "rollout/tokens": 1200,
        "reward/mean": 0.25,
        "policy/loss": 0.5,
    }
    spans = [
        _span(1, "policy/forward_backward", 100.0, 102.0),
        _span(1, "policy/forward_backward", 103.0, 104.5),  # a second minibatch
        _span(1, "policy/optimizer", 104.5, 104.75),
        _span(1, "policy/update", 100.0, 104.75),
        _span(1, "update", 99.75, 104.75, role="driver"),
        _span(2, "policy/optimizer", 200.0, 209.0),
    ]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    return tmp_path


def test_our_phases_add_up_to_the_step(run_folder: Path) -> None:
    (step,) = step_time.read_run(run_folder)
    assert {name: step[name] for name in step_time.PHASES} == {
        "generation": 3.0,
        "rewards": 0.75,  # 0.5 + 0.25
        "update": 5.0,
        "weight_sync": 1.0,
        "other": 0.25,  # 10 - 9.75, which is account and other
    }
    assert sum(step[name] for name in step_time.PHASES) == step["step"] == 10.0


def test_parts_of_the_update_come_from_the_learners_spans_of_that_step(run_folder: Path) -> None:
    (step,) = step_time.read_run(run_folder)
    assert step["forward_backward"] == 3.5  # 2 + 1.5
    assert step["optimizer"] == 0.25


def test_every_time_of_the_run_is_among_the_figures_and_nothing_else_of_its_metrics(run_folder: Path) -> None:
    (step,) = step_time.read_run(run_folder)
    assert step["time/update"] == 5.0
    assert step["busy/policy"] == 4.75
    assert "policy/loss" not in step


def test_trls_phases_add_up_to_the_step() -> None:
    theirs = {"step": 60.0, "generation": 30.0, "rewards": 0.5, "forward_backward": 28.0, "optimizer": 1.0}
    step = step_time.trl_step({**theirs, "other": 0.5, "tokens": 1200, "reward": 0.1})
    assert step["update"] == 29.0
    assert step["other"] == 0.5
    assert sum(step[name] for name in step_time.PHASES) == 60.0


def test_first_step_of_every_run_is_left_out_of_the_medians() -> None:
    runs = [[{"step": 99.0}, {"step": 1.0}, {"step": 5.0}], [{"step": 50.0}, {"step": 3.0}, {"step": 4.0}]]
    assert step_time.medians(runs) == {"step": 3.5}  # of 1, 3, 4, 5


def test_best_pairing_takes_each_side_in_its_faster_dtype() -> None:
    step_s: Any = {("ours", "float32"): 20.0, ("ours", "bfloat16"): 10.0}
    step_s |= {("trl", "float32"): 40.0, ("trl", "bfloat16"): 50.0}
    ratios = step_time.pairings(step_s, ("float32", "bfloat16"))
    assert {name: pair["ratio"] for name, pair in ratios.items()} == {
        "float32/float32": 2.0,  # 40 / 20
        "float32/bfloat16": 2.5,  # 50 / 20
        "bfloat16/float32": 4.0,  # 40 / 10
        "bfloat16/bfloat16": 5.0,  # 50 / 10
        "best/best": 4.0,  # TRL is faster in float32, we are in bfloat16
    }
    assert (ratios["best/best"]["ours"], ratios["best/best"]["trl"]) == ("bfloat16", "float32")


def test_runs_alternate_between_the_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def record(side: str, dtype: str) -> list[step_time.Step]:
        order.append(f"{side} {dtype}")
        return [{"step": 2.0}, {"step": 1.0}]

    monkeypatch.setattr(step_time, "run_ours", lambda arguments, dtype, folder: record("ours", dtype))
    monkeypatch.setattr(step_time, "run_trl", lambda arguments, dtype: record("trl", dtype))
    step_time.measure(step_time.parse(["--rounds", "2", "--steps", "2"]))
    assert order == ["ours float32", "trl float32", "ours bfloat16", "trl bfloat16"] * 2


def test_last_line_of_the_step_benchmark_has_the_figures_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"generation": 2.0, "rewards": 0.0, "update": 7.0, "weight_sync": 1.0, "other": 0.0}
    ours = {"step": 10.0, **phases, "forward_backward": 6.5, "optimizer": 0.5, "tokens": 1200}
    theirs = {**ours, "step": 45.0, "weight_sync": 0.0, "update": 43.0}
    runs: Any = {("ours", "float32"): [[ours, ours]], ("trl", "float32"): [[theirs, theirs]]}
    step_time.report(step_time.parse(["--dtype", "float32", "--rounds", "1", "--steps", "2"]), {"cpu": "made up"}, runs)
    output = capsys.readouterr().out
    figures = json.loads(output.splitlines()[-1])
    assert figures["ratio_vs_trl"] == 4.5
    assert figures["medians"]["trl"]["float32"]["step"] == 45.0
    assert figures["machine"] == {"cpu": "made up"}
    assert "| **step** | 10.00 | 45.00 |" in output
    assert "| weights to the engine | 1.00 | – |" in output
    assert "| **best/best** (float32/float32) | 4.50 |" in output


@pytest.mark.parametrize("options", [["--steps", "1"], ["--rounds", "0"]])
def test_a_measurement_that_would_have_no_steps_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        step_time.parse(options)
    assert stop.value.code == 2


@pytest.fixture
def config(tiny_untied: Path) -> Config:
    arguments = ["--model", str(tiny_untied), "--prompts", "2", "--samples", "3", "--max-new-tokens", "5"]
    return rollout.configuration(rollout.parse(arguments))


class Engine:
    """Answers every request and remembers it."""

    def __init__(self) -> None:
        self.seen: list[GenerationRequest] = []
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._remote))

    def _remote(self, request: GenerationRequest) -> tuple[Any, str]:
        self.seen.append(request)
        return self._answer(request), "columns"

    async def _answer(self, request: GenerationRequest) -> Completion:
        return Completion(request.request_id, 5, "length", 0, 0)


DRAWS = [PromptDraw(Prompt(f"p{i}", "?", (7, i)), draw_index=i, epoch=0) for i in (4, 5)]


async def test_bare_vllm_gets_the_very_requests_that_the_pool_makes(config: Config) -> None:
    engine = Engine()
    pool = RolloutPool([engine], run_seed=config.run.seed, deadline_s=10)
    measured = await rollout.through_pool(pool, DRAWS, config)
    assert measured.tokens == 30  # 2 prompts x 3 samples x 5 tokens
    assert rollout.requests_of(DRAWS, config) == sorted(engine.seen, key=lambda request: request.request_id)


@pytest.mark.parametrize("ours_first", [True, False])
async def test_a_round_never_generates_on_both_sides_at_once(config: Config, ours_first: bool) -> None:
    events: list[str] = []

    class Recorded(Engine):
        async def _answer(self, request: GenerationRequest) -> Completion:
            events.append("ours")
            return await super()._answer(request)

    class Bare:
        async def generate(self, requests: list[GenerationRequest]) -> rollout.Measured:
            events.append("bare")
            return rollout.Measured(1, 1.0)

    pool = RolloutPool([Recorded()], run_seed=1, deadline_s=10)
    await rollout.one_round(pool, Bare(), DRAWS, config, ours_first=ours_first)  # type: ignore[arg-type]
    assert events == (["ours"] * 6 + ["bare"] if ours_first else ["bare"] + ["ours"] * 6)


def test_rollout_ratio_is_that_of_the_medians() -> None:
    # Ours: 100, 90, 50 tokens/s, median 90. Bare: 100, 120, 100, median 100.
    rounds = [
        rollout.Round(rollout.Measured(200, 2.0), rollout.Measured(200, 2.0)),
        rollout.Round(rollout.Measured(180, 2.0), rollout.Measured(240, 2.0)),
        rollout.Round(rollout.Measured(100, 2.0), rollout.Measured(200, 2.0)),
    ]
    results = rollout.summarise(rounds)
    assert results["ratio_vs_bare"] == pytest.approx(0.9)
    assert results["ratio_by_round"] == pytest.approx([1.0, 0.75, 0.5])
    assert results["medians"]["ours"] == {"tokens_per_second": 90.0, "seconds": 2.0, "tokens": 180}


def test_a_side_that_fails_is_named_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no memory left')"]
    with pytest.raises(common.BenchmarkError, match=r"TRL in float32: exit code 1\n    no memory left"):
        common.run_child(command, what="TRL in float32", deadline_s=60)


def test_a_side_that_hangs_is_ended_at_its_deadline() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(common.BenchmarkError, match=r"ours in float32: not done after 0\.5 s"):
        common.run_child(command, what="ours in float32", deadline_s=0.5)


def test_output_without_a_json_object_in_its_last_line_is_an_error() -> None:
    assert common.last_json('a table\n{"step": 1}\n', what="TRL") == {"step": 1}
    for output in ("", "a table\n", "{}\n[1]\n"):
        with pytest.raises(common.BenchmarkError, match="TRL: its last line is not"):
            common.last_json(output, what="TRL")


def test_sides_get_the_same_threads_whatever_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert common.environment()["OMP_NUM_THREADS"] == str(common.threads())
