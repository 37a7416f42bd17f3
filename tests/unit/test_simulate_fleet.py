"""The simulation of the fleet: it drives the real router and health, and notices when they lose something."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.rollout.health import FleetHealth
from rlhf.rollout.lengths import LengthModel
from rlhf.rollout.router import Assignment, Router

# A script, started by its path, that imports what stands beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import simulate_fleet
import simulated_engine
from simulated_engine import Engine, SimulationError

# Engines die every three minutes, and one request in 500 hangs.
SMALL = ["--engines", "8", "--requests", "2000", "--step-groups", "64", "--kill-rate", "20", "--hang-rate", "0.002"]
SIZES = ["--sizes", "2", "4"]
QUIET = ["--kill-rate", "0", "--hang-rate", "0"]


@pytest.fixture(autouse=True)
def _few_timed_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_fleet, "REFILLS", 100)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert simulate_fleet.main([*SMALL, *SIZES, *arguments]) == code
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


# --- the code under test is the code that trains ---


def test_simulation_drives_the_router_health_and_lengths_of_the_package() -> None:
    options = simulate_fleet.parse([*SMALL, *SIZES])
    work = simulated_engine.log_normal(16, 8, median=10, sigma=1, limit=20, seed=0)
    simulation = simulate_fleet.Simulation(work, options, 0.0)
    assert type(simulation._router) is Router
    assert type(simulation._health) is FleetHealth
    assert type(simulation._lengths) is LengthModel


@pytest.mark.parametrize("module", [simulate_fleet, simulated_engine])
def test_simulation_has_no_copy_of_them(module: Any) -> None:
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    copied = {"Router", "FleetHealth", "LengthModel", "dispatch", "submit", "lose", "overdue", "expect", "probe_failed"}
    assert not defined & copied


# --- nothing is lost, and what is lost is noticed ---


def test_every_request_is_answered_once_though_engines_die_and_requests_hang(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, over = _run(capsys)["runs"]
    assert (plain["requests"], plain["answered"], plain["trained"]) == (2000, 2000, 2000)
    assert (plain["lost"], plain["twice"], plain["failed"], plain["withdrawn"]) == (0, 0, 0, 0)
    assert plain["deaths"] > 0
    assert plain["retried"] > plain["deaths"]  # requests of dead engines, and those that hung
    # 250 groups in steps of 80, which need 64 each, the last 10 of which it needs 8: 3 * 64 + 8 = 200 groups of 8.
    assert over["answered"] + over["withdrawn"] == over["requests"] == 2000
    assert (over["steps"], over["trained"]) == (4, 1600)
    assert over["lost"] == over["twice"] == over["failed"] == 0
    assert over["withdrawn"] > 0


def test_engine_that_fails_many_requests_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    # No engine is killed, but three requests in a row that hang make one dead.
    plain, _ = _run(capsys, "--kill-rate", "0", "--hang-rate", "0.1")["runs"]
    assert plain["deaths"] > 0
    assert plain["answered"] + plain["failed"] == 2000
    assert plain["lost"] == plain["twice"] == 0


class _Forgetful(Router):
    def dispatch(self) -> list[Assignment]:
        assigned = super().dispatch()
        for assignment in assigned:
            if assignment.request_id == "77":
                self.finish("77")
        return [assignment for assignment in assigned if assignment.request_id != "77"]


class _Repetitive(Router):
    def dispatch(self) -> list[Assignment]:
        assigned = super().dispatch()
        again = [Assignment("77", (a.engine + 1) % 8, 1) for a in assigned if a.request_id == "77"]
        return assigned + again


@pytest.mark.parametrize(("router", "count"), [(_Forgetful, "lost"), (_Repetitive, "twice")])
def test_router_that_loses_or_doubles_a_request_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: type[Router], count: str
) -> None:
    monkeypatch.setattr(simulate_fleet, "Router", router)
    monkeypatch.setattr(
        simulate_fleet, "refill_cost", lambda *_: dict.fromkeys(("mean_us", "median_us", "p99_us"), 1.0)
    )
    # Fewer requests than slots, so that there is room for one too many.
    few = ["--requests", "128", "--step-groups", "16", "--over-generation", "0"]
    (run,) = _run(capsys, *QUIET, *few, code=1)["runs"]
    assert run[count] == 1


def test_fleet_without_an_engine_left_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_fleet, "MAX_RESTARTS", 0)
    assert simulate_fleet.main([*SMALL, *SIZES, "--kill-rate", "2000"]) == 1
    assert "no engine is left: each of 8" in capsys.readouterr().err


# --- what it measures ---


def test_over_generation_shortens_the_tail_and_favours_short_answers(capsys: pytest.CaptureFixture[str]) -> None:
    plain, over = _run(capsys, *QUIET)["runs"]
    assert over["tail_mean_s"] < plain["tail_mean_s"]
    assert over["mean_length"] < plain["mean_length"]
    # All of the workload is trained on without it.
    work = simulated_engine.log_normal(2000, 8, median=600, sigma=0.8, limit=4096, seed=0)
    assert plain["mean_length"] == sum(work.tokens) / 2000


def test_idle_time_and_rates_of_a_run_worked_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two engines, one request each: 100 tokens at 8.1 ms are 0.81 s, and 300 are 2.43 s. The first engine idles for
    # 1.62 s of twice 2.43 s, a third; 400 tokens in 2.43 s; the step's only group ends then, so its tail is 0.
    (tmp_path / "lengths.txt").write_text("100\n300\n")
    arguments = ["--engines", "2", "--requests", "2", "--group-size", "2", "--step-groups", "1"]
    (run,) = _run(capsys, *QUIET, *arguments, "--over-generation", "0", "--lengths", str(tmp_path / "lengths.txt"))[
        "runs"
    ]
    assert run["seconds"] == pytest.approx(2.43)
    assert run["idle"] == pytest.approx(1 / 3)
    assert run["trained_tokens_per_s"] == run["decoded_tokens_per_s"] == pytest.approx(400 / 2.43)
    assert (run["tail_mean_s"], run["mean_length"], run["steps"]) == (0, 200, 1)
    assert run["refill_mean_us"] is None  # nothing had to wait


def test_growth_compares_cost_with_the_logarithm_of_the_engines() -> None:
    # From 16 to 256 engines the logarithm doubles; the cost grows by half.
    costs = {engines: {"median_us": median} for engines, median in ((16, 10.0), (64, 99.0), (256, 15.0))}
    assert simulate_fleet.growth(costs) == pytest.approx(0.75)


def test_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    assert simulate_fleet.percentile([float(i) for i in range(1, 201)], 0.99) == 198
    assert simulate_fleet.percentile([5.0], 0.99) == 5


def test_refill_cost_is_of_decisions_that_were_made() -> None:
    cost = simulate_fleet.refill_cost(2, slots=2, group_size=2, seed=0)
    assert 0 < cost["median_us"] <= cost["p99_us"]
    assert cost["mean_us"] > 0


# --- engines and lengths that are made up ---


def test_sequences_share_an_engine_and_each_slows_the_others() -> None:
    # Two run at 8.2 ms a token: the shorter is done after 10 * 8.2 = 82 ms; the other's last 10 take 8.1 ms each.
    engine = Engine(slots=2)
    engine.add("a", 10)
    engine.add("b", 20)
    assert engine.next_done() == pytest.approx(0.082)
    engine.advance(0.082)
    assert engine.take_done() == ["a"]
    assert engine.next_done() == pytest.approx(0.081)
    engine.advance(0.163)
    assert engine.take_done() == ["b"]
    engine.advance(0.263)
    assert (engine.tokens, engine.idle_s, engine.up_s) == pytest.approx((30, 0.1, 0.263))


def test_hanging_sequence_takes_its_slot_and_time_and_is_never_done() -> None:
    engine = Engine(slots=2)
    engine.add("a", float("inf"))
    assert engine.next_done() is None
    engine.add("b", 10)
    engine.advance(0.082)
    assert engine.take_done() == ["b"]
    assert engine.take_done() == []
    assert engine.tokens == pytest.approx(10)
    engine.drop("a")
    assert engine.hanging == len(engine.running) == 0


def test_engine_refuses_what_a_router_must_not_send_it() -> None:
    engine = Engine(slots=2)
    engine.add("a", 1)
    with pytest.raises(SimulationError, match="request a was sent to an engine that is down, full, or has it already"):
        engine.add("a", 1)
    engine.add("b", 1)
    with pytest.raises(SimulationError, match="request c"):
        engine.add("c", 1)
    engine.crash()
    with pytest.raises(SimulationError, match="request d"):
        engine.add("d", 1)


def test_log_normal_lengths_have_the_median_and_spread_asked_for() -> None:
    tokens = sorted(simulated_engine.log_normal(80_000, 8, median=600, sigma=0.8, limit=4096, seed=1).tokens)
    # The median is 600; one sigma up is 600 * e^0.8 = 1335, at 84.1 %. Both to some percent: there are 2,500 prompts.
    assert tokens[40_000] == pytest.approx(600, rel=0.05)
    assert tokens[67_280] == pytest.approx(1335, rel=0.05)
    assert tokens[0] >= 1
    assert tokens[-1] == 4096


def test_lengths_of_a_file_are_used_in_turn_and_a_group_is_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("1\n2\n3\n900\n5\n")
    # Two whole groups of two; the fifth line is left over, and 900 is above the limit.
    work = simulated_engine.from_file(path, requests=5, group_size=2, limit=100)
    assert work.tokens == [1, 2, 3, 100, 1, 2]
    assert (work.groups, work.prompts) == (3, 2)


def test_file_with_less_than_a_group_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("1\n2\n")
    assert simulate_fleet.main([*SMALL, "--lengths", str(tmp_path / "lengths.txt")]) == 1
    assert "has 2 lengths, and a group takes 8" in capsys.readouterr().err


# --- the command ---


def test_deadline_that_the_longest_response_would_miss_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        simulate_fleet.main(["--deadline-s", "45"])
    assert exit_.value.code == 2
    # 4096 tokens at 8 + 32 * 0.1 = 11.2 ms
    assert "the longest response takes 46 s" in capsys.readouterr().err


def test_help_names_only_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        simulate_fleet.main(["--help"])
    assert exit_.value.code == 0
    assert "over-generation favours short answers" in capsys.readouterr().out
    named = set(re.findall(r"--([a-z-]+)", simulate_fleet.__doc__ or ""))
    assert named
    assert named <= {name.replace("_", "-") for name in vars(simulate_fleet.parse([]))}
