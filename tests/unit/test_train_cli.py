"""`python -m rlhf.train`: what it refuses, shows and returns, with a trainer that does what the test says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf import train
from rlhf.cluster.model_shape import UnknownShape
from rlhf.cluster.preflight import Refused
from rlhf.config import Config
from rlhf.data import DataError

MODEL = """
{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 104}
"""
CONFIG = """\
run: {{dir: {folder}/runs, name: try1}}
model: {{path: {folder}/model}}
data: {{prompts: {{source: reasoning_gym, task: chain_sum}}}}
reward: {{functions: [{{name: reasoning_gym, options: {{extract: last_number}}}}]}}
"""

FakeTrainer = Callable[[Callable[[Config], None]], None]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(MODEL)
    file = tmp_path / "ppo.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return str(file)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    """Put a trainer in place whose `fit` is the given function of the configuration."""

    def install(fit: Callable[[Config], None]) -> None:
        class PPOTrainer:
            def __init__(self, config: Config) -> None:
                self.config = config

            def fit(self) -> None:
                fit(self.config)

        module = types.ModuleType("rlhf.trainers.ppo")
        module.PPOTrainer = PPOTrainer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rlhf.trainers.ppo", module)

    return install


def raises(error: BaseException) -> Callable[[Config], None]:
    def fit(config: Config) -> None:
        raise error

    return fit


def test_a_run_that_ends_well_returns_0_and_has_the_overrides(config: str, trainer: FakeTrainer) -> None:
    seen: list[Any] = []
    trainer(lambda loaded: seen.append((loaded.run.name, loaded.policy.learning_rate)))
    assert train.main(["--config", config, "policy.learning_rate=2e-6", "run.name=try2"]) == 0
    assert seen == [("try2", 2e-6)]


def test_overrides_may_stand_around_options(config: str, trainer: FakeTrainer) -> None:
    seen: list[int] = []
    trainer(lambda loaded: seen.append(loaded.run.steps + loaded.run.seed))
    assert train.main(["run.steps=3", "--config", config, "run.seed=4"]) == 0
    assert seen == [7]


def test_a_refused_configuration_returns_2_and_lists_all_errors(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(raises(AssertionError("started")))
    assert train.main(["--config", config, "policy.learnig_rate=1", "run.steps=0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean policy.learning_rate?" in err
    assert "run.steps = 0" in err
    assert "Traceback" not in err


def test_mistyped_options_of_a_reward_function_are_refused_before_anything_starts(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(raises(AssertionError("started")))
    assert train.main(["--config", config, "reward.functions.0.options.extrac=tag"]) == 2
    err = capsys.readouterr().err
    assert "reward.functions.0.options.extrac" in err
    assert "'extract'" in err


@pytest.mark.parametrize(
    "error",
    [
        Refused("needs 4 GPUs, cluster has 1"),
        UnknownShape("config.json: no vocab_size"),
        DataError("x.jsonl:3: field 'prompt' is missing"),
    ],
)
def test_what_the_trainer_refuses_before_it_starts_returns_2(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    trainer(raises(error))
    assert train.main(["--config", config]) == 2
    assert capsys.readouterr().err == f"refused: {error}\n"


def test_a_failure_returns_1_with_its_message_and_where_it_came_from(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(raises(ZeroDivisionError("no samples")))
    assert train.main(["--config", config]) == 1
    err = capsys.readouterr().err
    assert err.endswith("failed: ZeroDivisionError: no samples\n")
    assert "Traceback" in err


def test_a_failure_that_is_written_for_users_comes_without_our_own_traceback(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlhf.cluster.wait import DeadlineExceeded

    trainer(raises(DeadlineExceeded("sync 3: not done after 120 s")))
    assert train.main(["--config", config]) == 1
    assert capsys.readouterr().err == "failed: DeadlineExceeded: sync 3: not done after 120 s\n"


def test_an_interruption_returns_130(config: str, trainer: FakeTrainer) -> None:
    trainer(raises(KeyboardInterrupt()))
    assert train.main(["--config", config]) == 130


def test_sigterm_ends_like_an_interruption_and_lets_the_event_loop_clean_up(config: str, trainer: FakeTrainer) -> None:
    import asyncio

    cleaned: list[bool] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    trainer(lambda loaded: asyncio.run(work()))
    before = signal.getsignal(signal.SIGTERM)
    assert train.main(["--config", config]) == 130
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_through_the_handler_that_ray_installs_returns_130_as_well(config: str, trainer: FakeTrainer) -> None:
    trainer(raises(SystemExit(signal.SIGTERM)))
    assert train.main(["--config", config]) == 130


def test_a_dry_run_shows_configuration_and_placement_and_starts_nothing(
    config: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(raises(AssertionError("started")))
    assert train.main(["--config", config, "--dry-run", "policy.ranks=3", "placement.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "  ranks: 3\n" in out
    assert any(line.split()[:3] == ["policy", "3", "3"] for line in out.splitlines())
    assert not any(line.startswith("reference ") for line in out.splitlines())
    assert "available:" in out


def test_an_unknown_option_is_refused_with_the_way_to_write_a_setting(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--config", config, "--run.steps=3"])
    assert caught.value.code == 2
    assert "settings are written without dashes: run.steps=value" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    sections = [name for name in Config.model_fields if name != "task"]
    for expected in (*sections, "policy.learning_rate=2e-6", "docs/configuration.md", "130"):
        assert expected in out


def test_the_command_refuses_in_its_own_process_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", "--config", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "Traceback" not in done.stderr
