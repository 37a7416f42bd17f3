"""Rules about low-rank adapters, each with a case that it refuses and one that it doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.algorithms.catalogue import has_reference_pool, needs_reference, policy_is_reference
from rlhf.config import config_from_dict, dump_config
from rlhf.config.rules_lora import adapters_find_their_layers
from rlhf.config.yaml_source import parse_value
from tests.unit.configs import build, refusals

KL = {"algorithm.kl": {"where": "loss", "coefficient": 0.1}}
LORA = {"policy.lora": {"rank": 8}}


def test_all_weights_are_trained_unless_a_rank_is_given() -> None:
    assert build({}).policy.lora is None
    lora = build(LORA).policy.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32.0, "all-linear")
    assert "required and missing" in refusals({"policy.lora": {"alpha": 16}})["policy.lora.rank"]


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_head_and_embedding_have_no_adapters(name: str) -> None:
    found = refusals({"policy.lora": {"rank": 8, "target_modules": ["q_proj", name]}})
    assert "between embedding and output head" in found["policy.lora.target_modules.1"]


@pytest.mark.parametrize("targets", [[], ["self_attn.q_proj"], ["q-proj"], "q_proj"])
def test_targets_are_a_list_of_last_names_or_all(targets: object) -> None:
    found = refusals({"policy.lora": {"rank": 8, "target_modules": targets}})
    assert any(key.startswith("policy.lora.target_modules") for key in found)


def test_a_target_that_the_model_does_not_have_is_refused_with_the_nearest(tiny_untied: Path) -> None:
    lora = {"rank": 8, "target_modules": ["q_proj", "v_prj", "experts"]}
    problems = adapters_find_their_layers(build({"model.path": str(tiny_untied), "policy.lora": lora}))
    assert [(problem.key, problem.hint) for problem in problems] == [
        ("policy.lora.target_modules.1", "Did you mean v_proj?"),
        ("policy.lora.target_modules.2", "It has: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ]


def test_the_files_are_asked_when_a_configuration_is_loaded(tiny_untied: Path) -> None:
    changes = {"model.path": str(tiny_untied), "policy.lora": {"rank": 8, "target_modules": ["query"]}}
    assert "has no layer of this name" in refusals(changes, check_files=True)["policy.lora.target_modules.0"]


def test_what_a_hub_name_has_is_not_known_here() -> None:
    changes = {"model.path": "organisation/name", "policy.lora": {"rank": 8, "target_modules": ["query"]}}
    assert list(adapters_find_their_layers(build(changes))) == []


def test_adapters_start_from_the_model_and_not_from_another_runs_weights() -> None:
    start = {"checkpoint.init_from": "sft/checkpoints/step-000100"}
    found = refusals({**LORA, **start})["checkpoint.init_from"]
    assert "the frozen weights are those of model.path" in found
    assert "export" in found
    build(start)


def test_the_policy_without_its_adapters_is_the_reference() -> None:
    plain, adapted, without_kl = build(KL), build({**KL, **LORA}), build(LORA)
    assert [needs_reference(config) for config in (plain, adapted, without_kl)] == [True, True, False]
    assert [has_reference_pool(config) for config in (plain, adapted, without_kl)] == [True, False, False]
    assert [policy_is_reference(config) for config in (plain, adapted, without_kl)] == [False, True, False]


def test_settings_of_a_reference_that_is_not_started_are_refused() -> None:
    found = refusals({**KL, **LORA, "reference": {"ranks": 2}})
    assert "the policy is its own reference" in found["reference"]
    build({**KL, "reference": {"ranks": 2}})


def test_the_resolved_configuration_loads_again() -> None:
    config = build({**KL, **LORA})
    again = config_from_dict(parse_value(dump_config(config)), check_files=False)
    assert again == config
