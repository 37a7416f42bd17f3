"""What may differ between a checkpoint and the run that resumes from it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlhf.checkpoint import breaking, differences, explain
from rlhf.checkpoint.compatible import DECISIONS
from rlhf.config import keys
from tests.unit.configs import build


def settings(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return build(dict(changes or {})).model_dump(mode="python")


def changed(changes: Mapping[str, Any]) -> dict[str, bool]:
    """Keys that differ when these settings are changed, and whether that is refused."""
    return {change.key: change.breaks for change in differences(settings(), settings(changes))}


def test_equal_settings_have_no_differences() -> None:
    assert differences(settings(), settings()) == []


def test_what_was_saved_as_json_equals_what_it_was(tmp_path: Any) -> None:
    # Paths become text in a manifest, and tuples lists.
    now = build({"run.dir": tmp_path, "checkpoint.resume": tmp_path / "x", "checkpoint.every": 1})
    assert differences(now.model_dump(mode="json"), now.model_dump(mode="python")) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "organisation/other"),
        ("model.dtype", "float32"),
        ("run.seed", 2),
        ("data.prompts.size", 10),
        ("data.prompts.seed", 7),
        ("data.shuffle", False),
        ("data.system_prompt", "Think."),
        ("data.max_prompt_tokens", 100),
        ("data.overlong_prompts", "drop"),
        ("rollout.samples_per_prompt", 4),
        ("rollout.prompts_per_step", 4),
        ("rollout.max_new_tokens", 100),
        ("rollout.min_new_tokens", 2),
        ("rollout.sampling.temperature", 0.7),
        ("algorithm.advantage", "rloo"),
        ("algorithm.loss", "gspo"),
        ("algorithm.aggregation", "sequence_mean"),
        ("reward.shaping.clip", 1.0),
        ("policy.zero_stage", 3),
    ],
)
def test_what_makes_it_another_run_is_refused(key: str, value: object) -> None:
    assert changed({key: value}) == {key: True}


def test_adapters_are_another_run_than_all_weights_and_than_other_adapters() -> None:
    plain, adapted = settings(), settings({"policy.lora": {"rank": 8}})
    before_there_were_adapters = {**plain, "policy": {k: v for k, v in plain["policy"].items() if k != "lora"}}
    assert breaking(differences(plain, adapted))
    assert breaking(differences(adapted, plain))
    assert [c.key for c in breaking(differences(before_there_were_adapters, adapted))] == ["policy.lora.rank"]
    assert differences(before_there_were_adapters, plain) == []
    doubled = settings({"policy.lora": {"rank": 8, "alpha": 64}})
    assert [(c.key, c.breaks) for c in differences(adapted, doubled)] == [("policy.lora.alpha", True)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.steps", 40),
        ("run.name", "again"),
        ("rollout.engines", 4),
        ("rollout.deadline_s", 60),
        ("rollout.tensor_parallel", 2),
        ("rollout.on_error", "drop"),
        ("policy.learning_rate", 1e-6),
        ("policy.weight_decay", 0.1),
        ("policy.ranks", 2),
        ("policy.deadline_s", 60),
        ("policy.max_tokens_per_microbatch", 100),
        ("reward.on_error", "drop"),
        ("reward.workers", 2),
        ("weights.bucket_bytes", 1000),
        ("fault_tolerance.max_restarts", 3),
        ("checkpoint.every", 5),
        ("placement.device", "cpu"),
        ("tracking.console", False),
    ],
)
def test_what_only_changes_how_it_runs_is_shown_and_allowed(key: str, value: object) -> None:
    assert changed({key: value}) == {key: False}


def test_another_reward_is_refused_and_so_is_a_reward_model_beside_it() -> None:
    assert changed({"reward.functions": [{"name": "length", "options": {"target": 5}}]}) == {
        "reward.functions.0.name": True,
        "reward.functions.0.options": True,
        "reward.functions.0.options.target": True,
    }
    added = changed({"reward.model": {"path": "organisation/rm"}})
    assert added["reward.model.path"] and added["reward.model"]
    assert not added["reward.model.ranks"]


def test_held_out_problems_are_part_of_the_data() -> None:
    # They are taken out of the training prompts.
    found = changed({"evaluation": {"prompts": {"source": "reasoning_gym", "task": "chain_sum", "seed": 9}}})
    assert found["evaluation.prompts.seed"]
    assert not changed({"evaluation": None})


def test_ranks_are_refused_where_shards_are_not_to_be_converted() -> None:
    saved = settings({"policy.ranks": 2})
    now = settings({"policy.ranks": 1, "checkpoint.on_world_size_change": "error"})
    assert [change.key for change in breaking(differences(saved, now))] == ["policy.ranks"]


def test_a_key_that_an_earlier_version_did_not_know_is_no_change_at_its_default() -> None:
    saved = settings()
    del saved["rollout"]["over_generation"]
    del saved["rollout"]["sampling"]["temperature"]
    assert differences(saved, settings()) == []
    found = differences(saved, settings({"rollout.sampling.temperature": 0.7}))
    assert [(change.key, change.old, change.breaks) for change in found] == [
        ("rollout.sampling.temperature", "absent", True)
    ]


def test_a_key_that_only_the_checkpoint_has_is_a_change() -> None:
    saved = settings()
    saved["algorithm"]["old_trick"] = 3
    assert [(change.key, change.new, change.breaks) for change in differences(saved, settings())] == [
        ("algorithm.old_trick", "absent", True)
    ]


def test_what_nobody_decided_breaks() -> None:
    assert [change.breaks for change in differences({"new_section": 1}, {"new_section": 2})] == [True]


def test_every_section_is_decided_and_every_decision_is_about_a_key() -> None:
    known = {".".join(key) for key in keys.valid_keys()}
    assert {key.split(".")[0] for key in known} <= DECISIONS.keys()
    assert DECISIONS.keys() <= known
    assert all(decision.reason for decision in DECISIONS.values() if decision.breaks)


def test_secrets_are_neither_compared_nor_shown() -> None:
    def reward(key: str) -> dict[str, Any]:
        return {"reward.functions": [{"name": "my:judge", "options": {"api_key": key}}]}

    assert differences(settings(reward("one")), settings(reward("two"))) == []


def test_a_person_reads_the_refused_ones_first_each_with_reason_and_remedy() -> None:
    found = differences(settings(), settings({"policy.learning_rate": 1e-6, "run.seed": 2, "run.steps": 40}))
    assert explain(found) == [
        "refused  run.seed: 1 -> 2: data order and every sample's random stream follow from it. "
        "Set it back, or begin a new run with checkpoint.init_from",
        "changed  run.steps: 20 -> 40: linear and cosine learning rates now end there",
        "changed  policy.learning_rate: 1e-05 -> 1e-06: holds from here on; the schedule goes on at its place",
    ]
