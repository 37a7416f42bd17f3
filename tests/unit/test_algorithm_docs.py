"""docs/algorithms.md names every algorithm and only settings that work; the example computes what it says."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import yaml

from rlhf.algorithms import registry
from rlhf.algorithms.advantages import AdvantageBatch, estimate_advantages
from rlhf.algorithms.losses import LossTokens, policy_loss
from rlhf.config import Config, ConfigError, config_from_dict, load_config
from rlhf.config.catalogue import ADVANTAGES, LOSSES, OWN_ADVANTAGES, OWN_LOSSES
from rlhf.config.schema import AlgorithmConfig, CorrectionConfig, KLConfig, ShapingConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "custom_algorithm.py"
FRAGMENTS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
BASE = {
    "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
    "reward": {"functions": [{"name": "reasoning_gym"}]},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `changes` in it, section by section."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def with_fragment(fragment: str) -> Config:
    return config_from_dict(merged(BASE, yaml.safe_load(fragment)), check_files=False)


def rows(heading: str) -> dict[str, str]:
    """The rows of a section's tables, by each name that stands in backticks in their first cell."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = section.splitlines()
    found: dict[str, str] = {}
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        header = below.startswith("| ---")
        if line.startswith("| `") and not header:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", line.split(" | ")[0]), line)
    return found


def choices(section: type, key: str) -> set[str]:
    return set(get_args(section.model_fields[key].annotation))  # type: ignore[attr-defined]


class TestTables:
    def test_every_advantage_has_a_row(self) -> None:
        assert rows("Advantages").keys() == ADVANTAGES.keys()

    @pytest.mark.parametrize("name", ADVANTAGES)
    def test_row_of_an_advantage_says_what_the_catalogue_says(self, name: str) -> None:
        spec, row = ADVANTAGES[name], rows("Advantages")[name]
        last = row.rstrip("| ").rpartition(" | ")[2]
        assert all(f"`{setting}`" in last for setting in spec.settings)
        assert ("n ≥ 2" in last) == (spec.min_group_size == 2)
        assert ("any n" in last) == (spec.min_group_size == 1)
        assert ("advantage a token" in last) == (spec.level == "token")
        assert ("[critic]" in last) == spec.needs_critic
        assert ("greedy response" in row) == spec.needs_greedy

    def test_every_loss_has_a_row(self) -> None:
        assert rows("Policy losses").keys() == LOSSES.keys()

    @pytest.mark.parametrize("name", LOSSES)
    def test_row_of_a_loss_names_the_settings_that_it_reads(self, name: str) -> None:
        last = rows("Policy losses")[name].rstrip("| ").rpartition(" | ")[2]
        assert set(re.findall(r"`(\w+\.\w+)`", last)) == LOSSES[name].settings
        assert ("no ratio" in last) == (not LOSSES[name].uses_ratio)

    @pytest.mark.parametrize(
        ("heading", "section", "keys"),
        [
            ("Aggregation", AlgorithmConfig, ["aggregation"]),
            ("KL from the reference", KLConfig, ["estimator", "where", "controller"]),
            ("Old log-probs", AlgorithmConfig, ["old_logprobs"]),
            ("Correction of engine and trainer mismatch", CorrectionConfig, ["method"]),
        ],
    )
    def test_every_value_of_a_setting_has_a_row(self, heading: str, section: type, keys: list[str]) -> None:
        assert rows(heading).keys() == set().union(*(choices(section, key) for key in keys))

    def test_every_shaping_has_a_row(self) -> None:
        assert rows("Rewards on the way in").keys() == ShapingConfig.model_fields.keys()

    def test_default_correction_is_the_one_that_the_text_explains(self) -> None:
        (method, high) = re.findall(r"\*\*Why `(\w+)` at (\d+) is the default", TEXT)[0]
        assert (CorrectionConfig().method, CorrectionConfig().high) == (method, float(high))


class TestRecipes:
    def test_there_is_one_of_each(self) -> None:
        titles = re.findall(r"^\*\*([^*]+)\*\* \(", TEXT.split("\n## Recipes\n")[1], re.MULTILINE)
        assert titles == [
            "GRPO",
            "Dr. GRPO",
            "DAPO",
            "RLOO with KL in the reward",
            "REINFORCE++",
            "GSPO",
            "CISPO",
            "Decoupled PPO",
            "Classic PPO",
        ]
        # Each has a fragment, and so has the section on functions of one's own.
        assert len(FRAGMENTS) == len(titles) + 1

    @pytest.mark.parametrize("fragment", FRAGMENTS)
    def test_fragment_is_accepted(self, fragment: str) -> None:
        assert with_fragment(fragment).algorithm.advantage.endswith(yaml.safe_load(fragment)["algorithm"]["advantage"])

    def test_fragment_with_a_setting_without_effect_would_be_noticed(self) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.clip\.high"):
            with_fragment("algorithm: {loss: ppo, clip: {high: 0.28}}")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module; what it registers is forgotten afterwards."""
    monkeypatch.chdir(ROOT)
    kept: list[dict[str, Any]] = [
        OWN_ADVANTAGES,
        OWN_LOSSES,
        registry._ADVANTAGES.functions,
        registry._LOSSES.functions,
    ]
    before = [dict(one) for one in kept]
    module = sys.modules[registry.find_policy_loss(f"{EXAMPLE}:spo").__module__]
    yield module
    # The next import has to register again.
    del sys.modules[module.__name__]
    for one, content in zip(kept, before, strict=True):
        one.clear()
        one.update(content)


class TestExample:
    def config(self, example: ModuleType) -> AlgorithmConfig:
        file = ROOT / "configs" / "quickstart.yaml"
        return load_config(file, example.OWN, check_files=False).algorithm

    def test_its_configuration_names_its_own_functions(self, example: ModuleType) -> None:
        config = self.config(example)
        assert registry.own_advantage(config.advantage) is example.median_baseline
        assert registry.own_policy_loss(config.loss) is example.spo

    def test_the_documentation_names_its_functions_where_they_are(self, example: ModuleType) -> None:
        algorithm = with_fragment(FRAGMENTS[-1]).algorithm
        assert registry.find_advantage(algorithm.advantage) is example.median_baseline
        assert registry.find_policy_loss(algorithm.loss) is example.spo

    def test_baseline_is_the_median_of_each_group(self, example: ModuleType) -> None:
        # Group 7: rewards 0, 0.2, 1 with median 0.2. Group 3: 1 and 0, the middle of both is 0.5.
        batch = AdvantageBatch(
            rewards_S=torch.tensor([0.0, 1.0, 0.2, 0.0, 1.0], dtype=torch.float64),
            groups_S=torch.tensor([7, 3, 7, 3, 7]),
            lengths_S=torch.ones(5, dtype=torch.int64),
            penalties_N=torch.zeros(5, dtype=torch.float64),
        )
        advantages_N = estimate_advantages(batch, self.config(example)).advantages_N
        assert advantages_N.tolist() == pytest.approx([-0.2, 0.5, 0.0, -0.5, 0.8])

    def test_penalty_grows_with_the_distance_of_the_ratio(self, example: ModuleType) -> None:
        # r = 0.6 / 0.5 = 1.2, epsilon = 0.2, (r - 1)^2 / (2 epsilon) = 0.1.
        # A = 2:  2 x 0.1 - 1.2 x 2 = -2.2; slope in r: 2 x 0.2 / 0.2 - 2 = 0, so nothing pulls beyond 1 + epsilon.
        # A = -1: 1 x 0.1 + 1.2     =  1.3; slope in r: 1 x 0.2 / 0.2 + 1 = 2, in log pi 2 r = 2.4.
        logprobs_N = torch.tensor([math.log(0.6)] * 2, requires_grad=True)
        tokens = LossTokens(
            logprobs_N=logprobs_N,
            old_logprobs_N=torch.tensor([math.log(0.5)] * 2),
            advantages_N=torch.tensor([2.0, -1.0]),
            rows_N=torch.tensor([0, 1]),
            samples=2,
        )
        result = policy_loss(tokens, self.config(example), example.spo)
        assert result.loss_N.tolist() == pytest.approx([-2.2, 1.3])
        (gradient_N,) = torch.autograd.grad(result.loss_N.sum(), logprobs_N)
        assert gradient_N.tolist() == pytest.approx([0.0, 2.4], abs=1e-5)
        assert not result.clipped_N.any()

    def test_its_functions_travel_to_the_learner_with_what_they_ask_for(self, example: ModuleType) -> None:
        config = self.config(example)
        packed = registry.dump_own(config.advantage, config.loss)
        OWN_ADVANTAGES.clear()
        for name, function in (("advantage", example.median_baseline), ("loss", example.spo)):
            arrived = registry.load_own(packed[name])
            # By value: a process without this file can call it.
            assert arrived is not function
            assert arrived.__qualname__ == function.__qualname__
        assert OWN_ADVANTAGES["median_baseline"].min_group_size == 2
