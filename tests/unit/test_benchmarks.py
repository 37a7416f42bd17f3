"""The benchmarks' arithmetic and fairness, from made-up runs; nothing here starts an engine or trains."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhf.batching import CostModel, SampleLength, plan_packed
from rlhf.batching.plan import unique_tokens
from rlhf.cluster.needs import DeviceBytes
from rlhf.config import Config, dump_config, load_config
from rlhf.rollout.pool import RolloutPool
from rlhf.rollout.types import Completion, GenerationRequest
from rlhf.trajectories import Prompt, PromptDraw

# They are scripts, started by their path, and import what they share as a script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))
import algorithms
import bare_loop
import common
import learner
import learner_side
import memory
import planner
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


def test_rewards_are_those_of_the_last_ten_of_twenty_steps() -> None:
    rising: Any = [{"reward": reward} for reward in [0.0] * 10 + [0.5] * 5 + [1.0] * 5]
    flat: Any = [{"reward": 0.25}] * 20
    runs: Any = {("ours", "float32"): [rising, flat], ("trl", "float32"): [flat], ("trl", "bfloat16"): [flat[1:]]}
    rewards = step_time.late_rewards(runs)
    assert rewards == {("ours", "float32"): [0.75, 0.25], ("trl", "float32"): [0.25]}
    assert step_time.reward_rows(rewards) == [
        ["mean reward of the last 10 steps", "0.500 (0.750, 0.250)", "0.250 (0.250)"]
    ]
    assert step_time.reward_rows({}) == []


def test_runs_alternate_between_the_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def record(side: str, dtype: str, seed: int) -> list[step_time.Step]:
        order.append(f"{side} {dtype} {seed}")
        return [{"step": 2.0}, {"step": 1.0}]

    monkeypatch.setattr(step_time, "run_ours", lambda arguments, dtype, seed, folder: record("ours", dtype, seed))
    monkeypatch.setattr(step_time, "run_trl", lambda arguments, dtype, seed: record("trl", dtype, seed))
    step_time.measure(step_time.parse(["--rounds", "2", "--steps", "2", "--seed", "5"]))
    sides = ["ours float32", "trl float32", "ours bfloat16", "trl bfloat16"]
    assert order == [f"{side} {seed}" for seed in (5, 6) for side in sides]


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


GAE = ["--algorithms", "gae", "--seeds", "3", "--steps", "2"]


def algorithm_run(out: Path, *, steps: int = 2, evaluations: int = 2, **changes: Any) -> argparse.Namespace:
    """A made-up run folder of gae with seed 3, and the arguments that ask for it."""
    arguments = algorithms.parse([*GAE, "--out", str(out)])
    config: dict[str, Any] = {}
    for name, value in (algorithms.settings_of(arguments, "gae", 3) | changes).items():
        section, *between, key = name.split(".")
        inner = config.setdefault(section, {})
        for part in between:
            inner = inner.setdefault(part, {})
        inner[key] = value
    folder = out / "gae-seed3"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": n, "reward/mean": 0.25 * n, "time/step": 10.0 * n} for n in range(1, steps + 1)]
    held_out = [{"step": 0, "eval/accuracy": 0.125}, {"step": 2, "eval/accuracy": 0.5}][:evaluations]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    return arguments


def test_a_finished_run_of_an_algorithm_is_read_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = algorithm_run(tmp_path)
    monkeypatch.setattr(algorithms, "run_child", lambda *_, **__: pytest.fail("the run was started again"))
    curve = algorithms.curve(arguments, "gae", 3)
    assert curve == algorithms.Curve(rewards=[0.25, 0.5], before=0.125, after=0.5, seconds=[10.0, 20.0])


@pytest.mark.parametrize("lacks", [{"steps": 1}, {"evaluations": 1}])
def test_an_interrupted_run_of_an_algorithm_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any]
) -> None:
    arguments = algorithm_run(tmp_path, **lacks)
    commands: list[list[str]] = []
    monkeypatch.setattr(algorithms, "run_child", lambda command, **_: commands.append(command))
    with pytest.raises(common.BenchmarkError, match="don't have all 2 steps"):  # the child wrote nothing
        algorithms.curve(arguments, "gae", 3)
    assert {'run.if_exists="replace"', "run.seed=3", 'algorithm.advantage="gae"'} <= set(commands[0])


def test_a_run_with_other_settings_is_neither_taken_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = algorithm_run(tmp_path, **{"critic.learning_rate": 0.5})
    monkeypatch.setattr(algorithms, "run_child", lambda *_, **__: pytest.fail("the run was replaced"))
    with pytest.raises(common.BenchmarkError, match=r"critic\.learning_rate = 0\.5, not 0\.0001"):
        algorithms.curve(arguments, "gae", 3)


@pytest.mark.parametrize("algorithm", algorithms.ALGORITHMS)
def test_settings_of_every_algorithm_are_a_valid_configuration(tmp_path: Path, algorithm: str) -> None:
    settings = algorithms.settings_of(algorithms.parse(["--out", str(tmp_path)]), algorithm, 1)
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    config = load_config(common.QUICKSTART, overrides, check_files=False)
    assert config.run.name == f"{algorithm}-seed1"
    # What a run writes down is what `finished` compares with.
    written = yaml.safe_load(dump_config(config))
    assert {name: algorithms._at(written, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("steps", "expected"), [(20, [(1, 5), (6, 10), (11, 15), (16, 20)]), (2, [(1, 1), (2, 2)]), (6, None)]
)
def test_windows_cover_every_step_once(steps: int, expected: list[tuple[int, int]] | None) -> None:
    parts = algorithms.windows(steps)
    assert [step for part in parts for step in part] == list(range(1, steps + 1))
    assert expected is None or [(part[0], part[-1]) for part in parts] == expected


def test_an_algorithm_with_several_seeds_has_a_row_of_means() -> None:
    curves = {
        ("grpo", 1): algorithms.Curve([0.0, 0.5], before=0.25, after=0.5, seconds=[10.0, 20.0]),
        ("grpo", 2): algorithms.Curve([0.5, 1.0], before=0.25, after=1.0, seconds=[20.0, 30.0]),
        ("gspo", 1): algorithms.Curve([0.25, 0.25], before=0.25, after=0.25, seconds=[10.0, 10.0]),
    }
    header, rows = algorithms.table(curves, 2)
    assert header == ["mean reward of steps", "1", "2", "held-out before", "after", "median step"]
    assert rows == [
        ["grpo, seed 1", "0.000", "0.500", "25.0%", "50.0%", "15.0 s"],
        ["grpo, seed 2", "0.500", "1.000", "25.0%", "100.0%", "25.0 s"],
        ["**grpo, mean**", "0.250", "0.750", "25.0%", "75.0%", "20.0 s"],
        ["gspo, seed 1", "0.250", "0.250", "25.0%", "25.0%", "10.0 s"],
    ]


def test_last_line_of_the_algorithms_benchmark_has_every_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = algorithm_run(tmp_path)
    algorithms.report(arguments, {"cpu": "made up"}, {("gae", 3): algorithms.curve(arguments, "gae", 3)})
    output = capsys.readouterr().out
    (run,) = json.loads(output.splitlines()[-1])["runs"]
    assert run["rewards"] == [0.25, 0.5]
    assert run["held_out"] == {"before": 0.125, "after": 0.5}
    assert "| gae, seed 3 | 0.250 | 0.500 | 12.5% | 50.0% | 15.0 s |" in output


def learner_job(**changes: Any) -> learner_side.Job:
    """The first side that the learner benchmark would start, a bare loop, with these fields changed."""
    (job, *_) = learner.jobs(learner.parse([]), "groups", "constant")
    return dataclasses.replace(job, **changes)


def test_reference_step_of_the_learner_benchmark_has_1584_useful_tokens() -> None:
    samples = learner_side.make_samples(learner_job(), vocabulary=50)
    assert unique_tokens(sample.length for sample in samples) == 1584  # 8 x 46 + 64 x 19
    (shared,) = {sample.columns.token_ids[:46].tobytes() for sample in samples[:8]}  # type: ignore[union-attr]
    assert samples[8].columns.token_ids[:46].tobytes() != shared  # type: ignore[union-attr]


def test_samples_alone_have_a_prompt_each() -> None:
    samples = learner_side.make_samples(learner_job(workload="alone"), vocabulary=50)
    assert unique_tokens(sample.length for sample in samples) == 4160  # 64 x (46 + 19)


def test_log_normal_lengths_have_the_mean_that_was_asked_for_and_every_side_gets_the_same() -> None:
    drawn = learner_side.response_lengths(learner_job(lengths="log-normal", prompts=2000))
    assert sum(drawn) / len(drawn) == pytest.approx(19, rel=0.02)
    assert min(drawn) >= 1
    assert drawn == learner_side.response_lengths(learner_job(lengths="log-normal", prompts=2000, layout=None, ranks=2))


def test_sides_of_a_learner_workload_are_its_bare_loops_and_every_stage_with_every_number_of_ranks() -> None:
    sides = [job.side for job in learner.jobs(learner.parse(["--ranks", "1", "2"]), "alone", "constant")]
    ours = ["ZeRO 2, 1 rank", "ZeRO 2, 2 ranks", "ZeRO 3, 1 rank", "ZeRO 3, 2 ranks"]
    assert sides == ["bare, mask", "bare, split", *ours]


def test_runs_of_the_learner_benchmark_alternate_between_the_sides(
    tiny_untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def record(job: learner_side.Job) -> dict[str, Any]:
        order.append(job.side)
        times = {"passes": [1.0], "seconds": [2.0], "operations": 1.0, "matrix_rate": 1.0}
        return {**times, "attention": "", "threads": 1, "grad_norm": 1.0}

    monkeypatch.setattr(learner, "run", record)
    options = ["--model", str(tiny_untied), "--workloads", "groups", "--lengths", "constant", "--stages", "2"]
    learner.measure(learner.parse([*options, "--ranks", "1", "--rounds", "2"]))
    assert order == ["bare, plain", "bare, padded", "ZeRO 2, 1 rank"] * 2


def test_figures_of_a_learners_side_are_medians_over_all_runs() -> None:
    def made_up(seconds: list[float]) -> dict[str, Any]:
        times = {"passes": [s / 2 for s in seconds], "seconds": seconds, "operations": 600.0, "matrix_rate": 1000.0}
        own = {"reported": {"mfu": 0.5}, "reported_seconds": [0.8 * s for s in seconds]}
        return {**times, **own, "attention": "sdpa", "threads": 2, "grad_norm": 1.0}

    found = learner.summarise([made_up([1.0, 2.0, 9.0]), made_up([2.0, 2.0, 1.0])], useful=100)
    assert found["seconds"] == 2.0  # of 1, 1, 2, 2, 2, 9
    assert found["useful_tokens_per_second"] == 50.0  # 100 / 2
    assert found["mfu"] == pytest.approx(0.6)  # 600 / 1 s / 1000
    assert found["mfu_with_optimizer"] == pytest.approx(0.3)  # 600 / 2 s / 1000
    assert found["clock_over_reported"] == pytest.approx(1.25)  # 1 / 0.8


def test_packed_ratio_is_against_the_faster_bare_loop_and_the_lowest_of_a_stage_counts() -> None:
    def side(rate: float) -> dict[str, Any]:
        return {"useful_tokens_per_second": rate, "mfu": rate / 1000, "mfu_with_optimizer": rate / 2000}

    rows = {
        "bare, mask": side(200),
        "bare, split": side(400),
        "ZeRO 2, 1 rank": side(380),
        "ZeRO 2, 2 ranks": side(360),
    }
    grouped = learner.with_ratios({"bare, plain": side(80), "bare, padded": side(100), "ZeRO 2, 1 rank": side(320)})
    lowest = learner.headlines({("groups", "constant"): grouped, ("alone", "constant"): learner.with_ratios(rows)})
    assert lowest == {
        "ratio_vs_plain": 4.0,  # 320 / 80
        "ratio_vs_padded": 3.2,  # 320 / 100
        "ratio_vs_packed_zero2": 0.9,  # 360 / 400; nothing was measured at ZeRO 3
        "mfu": 0.32,
        "mfu_with_optimizer": 0.16,
    }


def test_sides_with_different_gradients_are_refused() -> None:
    learner.check_same_work({"bare, padded": {"grad_norm": 1.0}, "ZeRO 2, 1 rank": {"grad_norm": 1.04}})
    with pytest.raises(common.BenchmarkError, match="don't do the same work"):
        learner.check_same_work({"bare, padded": {"grad_norm": 1.0}, "ZeRO 2, 1 rank": {"grad_norm": 1.06}})


def test_block_mask_shows_each_token_its_own_sequence_up_to_itself() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert bare_loop.block_mask([2, 2]).int().tolist() == expected


def test_plain_rectangles_keep_the_order_of_the_batch_and_the_cap() -> None:
    lengths = [SampleLength(str(index), 0, tokens) for index, tokens in enumerate((3, 4, 5, 2, 11))]
    # 2 x 4 fits into 10 and 3 x 5 doesn't; 2 x 5 does; 11 is alone longer than that.
    found = bare_loop.in_order(lengths, 10)
    assert [micro_batch.sample_ids for micro_batch in found] == [("0", "1"), ("2", "3"), ("4",)]


@pytest.mark.parametrize("layout", ["plain", "mask", "split"])
def test_bare_loops_of_every_layout_have_the_same_gradient(tiny_untied: Path, layout: Any) -> None:
    samples = learner_side.make_samples(learner_job(lengths="log-normal", prompts=2, samples=3), vocabulary=104)
    norms = [
        bare_loop.BareLoop(tiny_untied, "float32", which, 256, 1e-5).update(samples).grad_norm
        for which in ("padded", layout)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_ranks_of_a_benchmark_run_at_once_and_know_their_place() -> None:
    # Each of the two waits for the other at the port that both were told.
    code = """
import json, socket, sys
rank, port = int(sys.argv[2]), int(sys.argv[4])
if rank == 0:
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(30)
        server.accept()
else:
    for attempt in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            __import__("time").sleep(0.1)
print(json.dumps({"rank": rank}))
"""
    found = common.run_ranks([sys.executable, "-c", code], 2, what="ranks", deadline_s=60)
    assert found == [{"rank": 0}, {"rank": 1}]


def test_memory_micro_batches_are_as_large_as_the_cap() -> None:
    job = memory.make_job(memory.Setting(3, ranks=2), "unused", 2048)
    samples = learner_side.make_samples(job, vocabulary=50)
    # 128 + 8 x 240 = 2048, two for each of two ranks.
    assert unique_tokens(sample.length for sample in samples) == 4 * 2048
    layout = plan_packed([sample.length for sample in samples], 2, 1, 2048, CostModel(1.0, 0.0))
    assert [[m.unique_tokens for m in rank] for rank in layout.minibatches[0].ranks] == [[2048] * 2] * 2


@pytest.mark.parametrize("setting", memory.SETTINGS)
def test_every_memory_setting_is_a_valid_configuration(tiny_untied: Path, setting: memory.Setting) -> None:
    policy = memory.make_config(setting, memory.make_job(setting, str(tiny_untied), 512)).policy
    assert (policy.zero_stage, policy.ranks, policy.offload) == (setting.stage, setting.ranks, setting.offload)
    assert policy.activation_checkpointing == setting.checkpointing
    assert (policy.lora is None) == (setting.lora == 0)


def test_memory_above_idle_is_that_of_the_rank_that_held_most_above_its_own() -> None:
    ranks = [
        {"idle": 100, "peaks": {"setup": 150, "optimizer": 180}, "attention": "", "threads": 1},
        {"idle": 50, "peaks": {"setup": 140, "optimizer": 120}, "attention": "", "threads": 1},
    ]
    found = memory.compare(ranks, DeviceBytes(weights=60, optimizer=40, sync_buckets=20))
    assert found["measured"] == 90  # 140 - 50, more than 180 - 100
    assert found["ratio"] == 0.75  # of 60 + 40 + 20
    assert found["ratio_without_sync"] == 0.9  # of 60 + 40
    assert memory.worst({"one": found, "other": {"ratio": 1.125}}, "ratio") == 0.25


def test_planned_costs_are_those_of_every_rank() -> None:
    samples = [SampleLength(str(index), index, tokens) for index, tokens in enumerate((4, 3, 3, 2))]
    costs = planner.rank_costs(plan_packed(samples, 2, 1, 100, CostModel(1.0, 0.0)), CostModel(1.0, 0.0))
    assert sorted(costs) == [6.0, 6.0]  # 4 + 2 and 3 + 3


def test_no_plan_is_more_even_than_its_largest_sample_allows() -> None:
    found = planner.outcome([10.0, 6.0, 8.0], 0.1, largest=10.0)
    # Of the mean 8: (10 - 6) / 8, 10 / 8 - 1, and the largest sample alone is as much as the highest rank.
    assert found == planner.Outcome(seconds=0.1, spread=0.5, above_mean=0.25, floor=0.25)
    assert planner.outcome([8.0, 8.0], 0.1, largest=5.0).floor == 0.0


def test_planned_lengths_have_the_mean_that_was_asked_for_and_a_groups_samples_share_a_prompt() -> None:
    samples = planner.lengths(planner.Batch(8, 50, 300, 0.6), 40_000, 8192, seed=0)
    assert sum(sample.response_tokens for sample in samples) / 40_000 == pytest.approx(300, rel=0.02)
    assert [sample.group_id for sample in samples[:17]] == [0] * 8 + [1] * 8 + [2]
    assert {sample.prompt_tokens for sample in samples} == {50}
