"""Loading: YAML, overrides, every error at once and in words, and the way back to YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import Config, ConfigError, config_from_dict, dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])

MINIMAL = """\
data:
  prompts: {source: reasoning_gym, task: chain_sum}
reward:
  functions: [{name: reasoning_gym}]
"""


def load(folder: Path, text: str, *overrides: str) -> Config:
    file = folder / "ppo.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides, check_files=False)


def refused(folder: Path, text: str, *overrides: str) -> str:
    """The message of a refusal, with the folder left out of the places."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_importing_the_package_and_its_configuration_needs_none_of_the_heavy_libraries() -> None:
    heavy = ("torch", "ray", "vllm", "transformers", "deepspeed", "flash_attn")
    code = f"import sys, rlhf, rlhf.config, rlhf.train; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load_config(path, check_files=False).run.name


def test_the_quickstart_evaluates_on_other_problems_than_it_trains_on() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", check_files=False)
    assert config.evaluation is not None
    train, held_out = config.data.prompts, config.evaluation.prompts
    assert train.source == held_out.source == "reasoning_gym"
    assert (train.task, train.options) == (held_out.task, held_out.options)
    assert train.seed != held_out.seed


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "'1e-6'", "1E-6", "0.000001"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    text = f"{MINIMAL}policy: {{learning_rate: {written}}}\n"
    assert load(tmp_path, text).policy.learning_rate == 1e-6
    assert load(tmp_path, MINIMAL, f"policy.learning_rate={written}").policy.learning_rate == 1e-6


def test_an_exponent_in_free_form_options_is_a_number_too(tmp_path: Path) -> None:
    text = MINIMAL.replace("{name: reasoning_gym}", "{name: 'm:f', options: {a: 1e-6, b: '1e-6', c: off, d: 010}}")
    options = load(tmp_path, text).reward.functions[0].options
    assert options == {"a": 1e-6, "b": "1e-6", "c": "off", "d": 10}


def test_overrides_replace_values_and_reach_into_lists(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        MINIMAL,
        "reward.functions.0.weight=2",
        'rollout.sampling.stop=["\\n", "###"]',
        "run.name=try2",
        "run.steps=3",
        "run.steps=4",
        "data.system_prompt=",
        "reward.on_error=-1",
    )
    assert config.reward.functions[0].weight == 2
    assert config.rollout.sampling.stop == ["\n", "###"]
    assert (config.run.name, config.run.steps) == ("try2", 4)
    assert config.data.system_prompt is None
    assert config.reward.on_error == -1


def test_an_override_changes_one_of_two_values_that_share_an_anchor(tmp_path: Path) -> None:
    text = """\
data: {prompts: &p {source: reasoning_gym, task: chain_sum}}
evaluation: {prompts: *p}
reward: {functions: [{name: reasoning_gym}]}
"""
    config = load(tmp_path, text, "evaluation.prompts.seed=7")
    assert config.evaluation is not None
    assert config.evaluation.prompts.seed == 7  # type: ignore[union-attr]
    assert config.data.prompts.seed == 42  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "key", "suggested"),
    [
        ("policy: {learnig_rate: 1}", "policy.learnig_rate", "policy.learning_rate"),
        ("learning_rate: 1", "learning_rate", "policy.learning_rate"),
        ("algorithm: {kl_coeff: 0.1}", "algorithm.kl_coeff", "algorithm.kl.coefficient"),
        ("algorithm: {kl: {coef: 0.1}}", "algorithm.kl.coef", "algorithm.kl.coefficient"),
        ("actor: {learnig_rate: 1}", "actor.learnig_rate", "policy.learning_rate"),
        ("policy: {lr: 1}", "policy.lr", "policy.learning_rate"),
        ("rollout: {temperature: 1}", "rollout.temperature", "rollout.sampling.temperature"),
        ("policy: {seed: 1}", "policy.seed", "run.seed"),
        ("tracking: {wandb: {projet: x}}", "tracking.wandb.projet", "tracking.wandb.project"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(
    tmp_path: Path, text: str, key: str, suggested: str
) -> None:
    message = refused(tmp_path, f"{MINIMAL}{text}\n")
    assert f"ppo.yaml:5: {key} = " in message
    assert f"unknown key. Did you mean {suggested}?" in message


def test_unknown_keys_are_refused_in_lists_and_kinds_of_a_union(tmp_path: Path) -> None:
    text = """\
data: {prompts: {source: reasoning_gym, task: chain_sum, sise: 5}}
reward:
  functions:
    - {name: reasoning_gym, weigth: 2}
"""
    message = refused(tmp_path, text)
    assert "ppo.yaml:1: data.prompts.sise = 5: unknown key. Did you mean data.prompts.size?" in message
    assert "ppo.yaml:4: reward.functions.0.weigth = 2: unknown key. Did you mean reward.functions.0.weight?" in message


def test_a_mistyped_override_is_refused_as_one_of_the_command_line(tmp_path: Path) -> None:
    message = refused(tmp_path, MINIMAL, "policy.learnin_rate=1e-6", "polcy.epochs=2", "run.steps=0", "steps")
    assert "command line: policy.learnin_rate = 1e-06: unknown key. Did you mean policy.learning_rate?" in message
    assert "command line: polcy.epochs = 2: unknown key. Did you mean policy.epochs?" in message
    assert "command line: run.steps = 0: must be greater than or equal to 1" in message
    assert "command line: 'steps' is not an override. Write section.key=value" in message


def test_overrides_that_lead_nowhere_say_so(tmp_path: Path) -> None:
    message = refused(
        tmp_path, MINIMAL, "reward.functions.1.weight=2", "run.name.x=1", "run.steps=[", "rollout.sampling.stop.0=a"
    )
    assert "reward.functions.1.weight: reward.functions.1 has no keys or items to set" in message
    assert "run.name = {'x': 1}: must be a valid string" in message
    assert "run.steps = '[': the value is not valid YAML" in message
    assert "rollout.sampling.stop = {'0': 'a'}: must be a valid list" in message


def test_all_errors_of_a_file_come_at_once_with_place_value_and_rule(tmp_path: Path) -> None:
    text = """\
run: {name: a b, if_exists: resume}
policy:
  epochs: 2.5
  zero_stage: true
rollout:
  samples_per_prompt: 1
  sampling: {temperature: 0, stop: ["", 3]}
algorithm: {advantage: rloo, loss: pppo}
data:
  prompts: {source: jsnl}
reward:
  functions: []
  on_error: rase
"""
    message = refused(tmp_path, text)
    assert message.splitlines()[0] == "configuration refused, 12 errors:"
    for expected in (
        "ppo.yaml:1: run.name = 'a b': must be letters, digits",
        "ppo.yaml:1: run.if_exists = 'resume': there is nothing to resume from while checkpoint.every is 0",
        "ppo.yaml:3: policy.epochs = 2.5: must be a valid integer",
        "ppo.yaml:4: policy.zero_stage = True: must be one of: 1, 2, 3",
        # Rules between keys are checked beside the errors of single keys.
        "ppo.yaml:6: rollout.samples_per_prompt = 1: algorithm.advantage rloo",
        "ppo.yaml:7: rollout.sampling.temperature = 0.0: greedy samples can't be trained on",
        "ppo.yaml:7: rollout.sampling.stop.0 = '': must have at least 1 character",
        "ppo.yaml:7: rollout.sampling.stop.1 = 3: must be a valid string",
        "ppo.yaml:8: algorithm.loss = 'pppo': must be one of: ppo, gspo",
        "ppo.yaml:10: data.prompts.source = 'jsnl': must be one of: reasoning_gym, jsonl. Did you mean jsonl?",
        "ppo.yaml:12: reward.functions: there is neither a reward function nor a reward model",
        "ppo.yaml:13: reward.on_error = 'rase': must be one of: raise, drop or a number. Did you mean raise?",
    ):
        assert expected in message, expected


def test_missing_sections_and_keys_are_named(tmp_path: Path) -> None:
    message = refused(tmp_path, "")
    assert "ppo.yaml: data: this key is required and missing" in message
    assert "ppo.yaml: reward: this key is required and missing" in message
    message = refused(tmp_path, "data: {prompts: {task: chain_sum}}\nreward: {functions: [{weight: 1}]}\n")
    assert "data.prompts.source: this key is required and missing. One of: reasoning_gym, jsonl" in message
    assert "reward.functions.0.name: this key is required and missing" in message


def test_an_incomplete_reward_model_does_not_hide_what_else_is_wrong(tmp_path: Path) -> None:
    text = MINIMAL + "  model: {pth: org/rm, rank: 2}\nrollout: {samples_per_prompt: 1}\n"
    message = refused(tmp_path, text)
    assert "ppo.yaml:5: reward.model.path: this key is required and missing" in message
    assert "ppo.yaml:5: reward.model.pth = 'org/rm': unknown key. Did you mean reward.model.path?" in message
    assert "ppo.yaml:5: reward.model.rank = 2: unknown key. Did you mean reward.model.ranks?" in message
    assert "ppo.yaml:6: rollout.samples_per_prompt = 1: algorithm.advantage grpo" in message


@pytest.mark.parametrize(
    "key", ["policy.epochs", "policy.learning_rate", "reward.on_error", "reward.functions.0.weight"]
)
def test_true_is_not_taken_for_the_number_one(tmp_path: Path, key: str) -> None:
    assert f"{key} = True: must be" in refused(tmp_path, MINIMAL, f"{key}=true")


@pytest.mark.parametrize("value", [".nan", ".inf", "-1"])
def test_numbers_that_mean_nothing_are_refused(tmp_path: Path, value: str) -> None:
    assert "policy.learning_rate" in refused(tmp_path, MINIMAL, f"policy.learning_rate={value}")


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = refused(tmp_path, f"{MINIMAL}policy:\n  epochs: 1\n  ranks: 2\n  epochs: 2\n")
    assert "ppo.yaml:8: policy.epochs: this key stands twice; the first one is on line 6" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: [", "ppo.yaml:2: not valid YAML"),
        ("run:\n\tname: x", "ppo.yaml:2: not valid YAML"),
        ("- run", "ppo.yaml: a configuration is a mapping of sections"),
        ("run: &a [*a]", "ppo.yaml:1: not valid YAML: an alias refers to itself"),
        ("run: !!python/object:os.system {}", "ppo.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        (f"{MINIMAL}3: 4", "ppo.yaml: 3: a key must be text: put it in quotes"),
    ],
)
def test_what_is_not_a_configuration_is_refused_without_a_traceback(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, f"{text}\n")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"quikstart.yaml: no such file. Did you mean .*/quickstart.yaml"):
        load_config(tmp_path / "quikstart.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(ConfigError, match="not UTF-8 text: byte 15"):
        load_config(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_config(tmp_path)


def test_text_that_looks_like_a_number_wants_quotes(tmp_path: Path) -> None:
    assert "For the text, put it in quotes: '7'" in refused(tmp_path, MINIMAL, "run.name=7")


def test_configurations_can_be_built_in_python() -> None:
    data: dict[str, Any] = {
        "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
        "reward": {"functions": [{"name": "reasoning_gym"}]},
    }
    assert config_from_dict(data, check_files=False).policy.ranks == 1
    data["policy"] = {"rank": 2}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(data, check_files=False)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.hint) == ("policy.rank", 2, "Did you mean policy.ranks?")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_dumped_configuration_loads_as_the_same(tmp_path: Path, path: Path) -> None:
    config = load_config(path, check_files=False)
    assert load(tmp_path, dump_config(config)) == config


def test_a_dump_keeps_what_is_easily_lost_in_yaml(tmp_path: Path) -> None:
    text = f"{MINIMAL}algorithm: {{kl: {{where: loss, coefficient: 0.1}}}}\nreference: {{ranks: 2}}\n"
    text = text.replace(
        "{name: reasoning_gym}", "{name: 'm:f', options: {a: '1e-6', b: 'true', c: '~', d: [é, \"\\n\"]}}"
    )
    config = load(tmp_path, text, "policy.learning_rate=3e-7", 'rollout.sampling.stop=["1", "#", ": "]')
    assert load(tmp_path, dump_config(config)) == config
    assert config.reference.ranks == 2
