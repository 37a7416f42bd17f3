"""Rules about how groups are generated, each with a case that it refuses and one that it doesn't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.configs import build, refusals


def test_over_generation_can_not_be_deterministic() -> None:
    changes = {"run.deterministic": True, "model.dtype": "float32", "rollout.over_generation.groups": 2}
    found = refusals(changes)
    assert "not on what happens to be complete first" in found["rollout.over_generation.groups"]
    build({**changes, "rollout.over_generation.groups": 0})


def test_what_becomes_of_the_rest_needs_a_rest() -> None:
    found = refusals({"rollout.over_generation.rest": "abort"})
    assert "has no effect while rollout.over_generation.groups is 0" in found["rollout.over_generation.rest"]
    build({"rollout.over_generation.rest": "abort", "rollout.over_generation.groups": 1})


def test_dynamic_sampling_needs_groups_whose_rewards_can_differ() -> None:
    changes = {"rollout.dynamic_sampling.enabled": True, "rollout.samples_per_prompt": 1}
    found = refusals({**changes, "algorithm.advantage": "reinforce"})
    assert "would replace every group" in found["rollout.samples_per_prompt"]
    build({**changes, "rollout.samples_per_prompt": 2})


def test_dynamic_sampling_may_draw_at_least_what_a_step_begins_with() -> None:
    # 8 + 10 groups begin, 2 x 8 may be drawn; 3 x 8 would do.
    changes = {
        "rollout.dynamic_sampling.enabled": True,
        "rollout.dynamic_sampling.max_factor": 2,
        "rollout.over_generation.groups": 10,
    }
    found = refusals(changes)
    assert found["rollout.dynamic_sampling.max_factor"].endswith("may draw only 2 x 8 = 16. Use at least 3")
    build({**changes, "rollout.dynamic_sampling.max_factor": 3})


@pytest.mark.parametrize(("key", "value"), [("max_factor", 3), ("at_limit", "train")])
def test_settings_of_dynamic_sampling_are_refused_while_it_is_off(key: str, value: object) -> None:
    name = f"rollout.dynamic_sampling.{key}"
    assert "has no effect while rollout.dynamic_sampling.enabled is false" in refusals({name: value})[name]
    build({name: value, "rollout.dynamic_sampling.enabled": True})


def test_a_stop_token_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    # vLLM would answer every request with an error, or on a GPU index beyond its logits.
    model = {"vocab_size": 104, "num_attention_heads": 4, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))
    changes = {"model.path": str(tmp_path), "run.dir": str(tmp_path), "rollout.sampling.stop_token_ids": [11, 5000]}
    found = refusals(changes, check_files=True)
    assert "the model's vocabulary has 104 ids, 0 to 103" in found["rollout.sampling.stop_token_ids.1"]
    build({**changes, "rollout.sampling.stop_token_ids": [11, 103]}, check_files=True)
