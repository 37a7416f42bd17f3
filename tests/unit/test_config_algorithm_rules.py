"""Rules of algorithms: what doesn't go together, and what was set but would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlhf.config import catalogue
from rlhf.config.catalogue import ADVANTAGES, LOSSES, AdvantageSpec, LossSpec, needs_critic, needs_reference
from rlhf.config.schema import AlgorithmConfig
from tests.unit.configs import build, refusals

GAE = {"algorithm.advantage": "gae"}
SEVERAL_UPDATES = {"policy.minibatches": 2}
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "maxrl")
OF_SINGLES = ("gae", "reinforce", "reinforce_plus_plus", "remax")


@pytest.fixture
def registered() -> Iterator[None]:
    catalogue.OWN_ADVANTAGES["ranked"] = AdvantageSpec("ranked", min_group_size=3, needs_critic=True)
    catalogue.OWN_LOSSES["plain"] = LossSpec("plain", uses_ratio=False)
    yield
    del catalogue.OWN_ADVANTAGES["ranked"], catalogue.OWN_LOSSES["plain"]


# --- names


@pytest.mark.parametrize("name", [*ADVANTAGES, "my.module:estimate", "mine/adv.py:estimate"])
def test_built_in_advantages_and_named_functions_are_accepted(name: str) -> None:
    assert build({"algorithm.advantage": name}).algorithm.advantage.endswith(name)


@pytest.mark.parametrize("name", [*LOSSES, "my.module:loss", "mine/losses.py:loss"])
def test_built_in_losses_and_named_functions_are_accepted(name: str) -> None:
    assert build({"algorithm.loss": name}).algorithm.loss.endswith(name)


def test_the_schema_names_every_advantage_and_loss() -> None:
    for key, known in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        description = AlgorithmConfig.model_fields[key].description or ""
        assert [name for name in known if f"`{name}`" not in description] == []


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("advantage", "gpo", "grpo"),
        ("advantage", "reinforce++", "reinforce"),
        ("advantage", "drgrpo", "dr_grpo"),
        ("loss", "gpso", "gspo"),
        ("loss", "CISPO", None),
        ("loss", "my.module:", None),
    ],
)
def test_an_unknown_advantage_or_loss_is_refused_with_the_nearest(key: str, name: str, near: str | None) -> None:
    found = refusals({f"algorithm.{key}": name})
    assert list(found) == [f"algorithm.{key}"]
    assert "module:function" in found[f"algorithm.{key}"]
    assert (f"Did you mean {near}?" if near else "@rlhf.register_") in found[f"algorithm.{key}"]


def test_registered_names_are_accepted_and_their_needs_are_kept(registered: None) -> None:
    config = build({"algorithm.advantage": "ranked", "algorithm.loss": "plain", "critic.ranks": 2})
    assert needs_critic(config)
    found = refusals({"algorithm.advantage": "ranked", "rollout.samples_per_prompt": 2})
    assert "ranked compares" in found["rollout.samples_per_prompt"]
    assert "Did you mean ranked?" in refusals({"algorithm.advantage": "rankd"})["algorithm.advantage"]


def test_options_are_refused_without_a_function_that_could_read_them() -> None:
    options = {"algorithm.options": {"beta": 0.1}}
    assert "functions of your own" in refusals(options)["algorithm.options"]
    assert build({**options, "algorithm.loss": "my.module:loss"}).algorithm.options == {"beta": 0.1}
    assert build({**options, "algorithm.advantage": "my.module:estimate"}).algorithm.options == {"beta": 0.1}


# --- settings that the advantage or the loss reads

ADVANTAGE_SETTINGS: dict[str, Any] = {"normalize": "none", "gamma": 0.9, "gae_lambda": 0.9, "whiten": False}
LOSS_SETTINGS: dict[str, Any] = {
    "clip.low": 0.1,
    "clip.high": 0.28,
    "clip.dual": 3.0,
    "sapo.positive": 2.0,
    "sapo.negative": 2.0,
    "dppo.divergence": "kl",
    "dppo.threshold": 0.1,
}


@pytest.mark.parametrize("setting", ADVANTAGE_SETTINGS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_setting_is_accepted_by_exactly_the_advantages_that_read_it(name: str, setting: str) -> None:
    changes = {"algorithm.advantage": name, f"algorithm.{setting}": ADVANTAGE_SETTINGS[setting]}
    if setting in ADVANTAGES[name].settings:
        assert build(changes)
    else:
        message = refusals(changes)[f"algorithm.{setting}"]
        assert f"has no effect while algorithm.advantage is {name}. Leave it out; it is for " in message


@pytest.mark.parametrize("setting", LOSS_SETTINGS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_setting_is_accepted_by_exactly_the_losses_that_read_it(name: str, setting: str) -> None:
    changes = {"algorithm.loss": name, f"algorithm.{setting}": LOSS_SETTINGS[setting], **SEVERAL_UPDATES}
    if setting in LOSSES[name].settings:
        assert build(changes)
    else:
        message = refusals(changes)[f"algorithm.{setting}"]
        assert f"has no effect while algorithm.loss is {name}. Leave it out; it is for " in message


def test_an_own_function_may_read_any_setting_of_its_kind() -> None:
    advantages = {f"algorithm.{key}": value for key, value in ADVANTAGE_SETTINGS.items()}
    losses = {f"algorithm.{key}": value for key, value in LOSS_SETTINGS.items()}
    assert build({"algorithm.advantage": "my.module:estimate", **advantages})
    assert build({"algorithm.loss": "my.module:loss", **losses})
    assert "algorithm.gamma" in refusals({"algorithm.loss": "my.module:loss", "algorithm.gamma": 0.9})


@pytest.mark.parametrize(
    ("loss", "setting"),
    [(loss, setting) for loss in LOSSES for setting in LOSS_SETTINGS if setting in LOSSES[loss].settings],
)
def test_a_trust_region_is_refused_where_the_ratio_is_always_1(loss: str, setting: str) -> None:
    key = f"algorithm.{setting}"
    changes = {"algorithm.loss": loss, key: LOSS_SETTINGS[setting]}
    message = refusals(changes)[key]
    assert "in the only update of a batch the ratio is 1. Raise policy.epochs or policy.minibatches" in message
    assert build({**changes, "policy.epochs": 2})
    assert build({**changes, **SEVERAL_UPDATES})
    # Ratios to the engine's log-probs differ from 1 as far as engine and trainer do.
    assert build({**changes, "algorithm.old_logprobs": "engine", "algorithm.correction.method": "none"})


def test_the_default_trust_region_may_be_restated() -> None:
    assert build({"algorithm.clip": {"low": 0.2, "high": 0.2}}).algorithm.clip.high == 0.2


# --- groups


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_estimator_with_one_sample_is_refused_naming_estimator_and_n(name: str) -> None:
    changes = {"algorithm.advantage": name, "rollout.samples_per_prompt": 1}
    message = refusals(changes)["rollout.samples_per_prompt"]
    assert f"algorithm.advantage {name}" in message
    assert "n = 1" in message
    assert build({**changes, "rollout.samples_per_prompt": 2}).rollout.samples_per_prompt == 2


@pytest.mark.parametrize("name", OF_SINGLES)
def test_an_estimator_for_single_samples_takes_groups_of_one(name: str) -> None:
    assert build({"algorithm.advantage": name, "rollout.samples_per_prompt": 1})


def test_every_estimator_is_for_groups_or_for_single_samples() -> None:
    assert {*OF_GROUPS, *OF_SINGLES} == set(ADVANTAGES)


# --- sampling


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", 0, "greedy samples can't be trained on"),
        ("top_p", 0.9, "Set rollout.sampling.top_k as well"),
        ("top_k", 1, "greedy samples can't be trained on"),
        ("top_k", 0, "Use -1 (off)"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused_with_the_reason(key: str, value: float, reason: str) -> None:
    assert reason in refusals({f"rollout.sampling.{key}": value})[f"rollout.sampling.{key}"]


@pytest.mark.parametrize("sampling", [{"top_k": 50}, {"top_k": 2, "top_p": 0.9}, {"top_k": -1, "top_p": 1.0}])
def test_top_k_alone_and_with_top_p_is_accepted(sampling: dict[str, float]) -> None:
    assert build({"rollout.sampling": sampling}).rollout.sampling.top_k == sampling["top_k"]


def test_a_shortest_response_longer_than_the_longest_is_refused() -> None:
    changes = {"rollout.max_new_tokens": 8}
    found = refusals({**changes, "rollout.min_new_tokens": 9})
    assert "at least 9 tokens while rollout.max_new_tokens is 8. Use at most 8" in found["rollout.min_new_tokens"]
    assert build({**changes, "rollout.min_new_tokens": 8}).rollout.min_new_tokens == 8


# --- KL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("coefficient", 0.1),
        ("estimator", "k1"),
        ("unbiased", True),
        ("controller", "adaptive"),
        ("target", 1.0),
        ("horizon", 100),
    ],
)
def test_kl_settings_are_refused_while_there_is_no_kl(key: str, value: Any) -> None:
    found = refusals({"algorithm.kl": {"where": "none", key: value}})
    assert found == {
        f"algorithm.kl.{key}": "has no effect while algorithm.kl.where is none. Set algorithm.kl.where and a "
        "coefficient above 0, or leave it out"
    }


def test_stating_that_there_is_no_kl_is_fine() -> None:
    config = build({"algorithm.kl": {"where": "none", "estimator": "k3", "coefficient": 0.0}})
    assert not needs_reference(config)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_with_coefficient_zero_is_refused(where: str) -> None:
    found = refusals({"algorithm.kl": {"where": where, "coefficient": 0}})
    assert "no effect but the cost of a reference model" in found["algorithm.kl.coefficient"]
    assert needs_reference(build({"algorithm.kl": {"where": where, "coefficient": 0.1}}))


def test_kl_has_one_place_so_it_cannot_be_applied_twice() -> None:
    found = refusals({"algorithm.kl": {"where": ["loss", "reward"], "coefficient": 0.1}})
    assert "must be one of: none, reward, loss" in found["algorithm.kl.where"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_every_estimator_goes_into_the_reward(estimator: str) -> None:
    assert build({"algorithm.kl": {"where": "reward", "coefficient": 0.1, "estimator": estimator}})


def test_k1_is_refused_in_the_loss_unless_it_is_unbiased() -> None:
    kl = {"where": "loss", "coefficient": 0.1}
    found = refusals({"algorithm.kl": kl | {"estimator": "k1"}})
    assert "Use k2 or k3, or set algorithm.kl.unbiased: true" in found["algorithm.kl.estimator"]
    assert build({"algorithm.kl": kl | {"estimator": "k1", "unbiased": True}})
    for estimator in ("k2", "k3", "abs"):
        assert build({"algorithm.kl": kl | {"estimator": estimator}})


@pytest.mark.parametrize("estimator", ["k2", "abs"])
def test_the_unbiased_gradient_is_refused_for_estimators_that_are_biased(estimator: str) -> None:
    kl = {"where": "loss", "coefficient": 0.1, "unbiased": True}
    assert "Use k1 or k3" in refusals({"algorithm.kl": kl | {"estimator": estimator}})["algorithm.kl.unbiased"]
    assert build({"algorithm.kl": kl | {"estimator": "k3"}, "algorithm.loss": "reinforce"})


def test_the_unbiased_gradient_is_refused_in_the_reward() -> None:
    found = refusals({"algorithm.kl": {"where": "reward", "coefficient": 0.1, "unbiased": True}})
    assert "no gradient goes through a reward" in found["algorithm.kl.unbiased"]
    assert "algorithm.kl.where: loss" in found["algorithm.kl.unbiased"]


@pytest.mark.parametrize("setting", [{"target": 1.0}, {"horizon": 100}])
def test_target_and_horizon_are_for_the_adaptive_controller(setting: dict[str, float]) -> None:
    kl: dict[str, Any] = {"where": "loss", "coefficient": 0.1, **setting}
    (key,) = setting
    assert "controller: adaptive" in refusals({"algorithm.kl": kl})[f"algorithm.kl.{key}"]
    assert build({"algorithm.kl": kl | {"controller": "adaptive"}})


def test_maxrl_is_refused_with_kl_in_the_reward() -> None:
    changes: dict[str, Any] = {"algorithm.advantage": "maxrl"}
    found = refusals({**changes, "algorithm.kl": {"where": "reward", "coefficient": 0.1}})
    assert "needs rewards of at least 0" in found["algorithm.kl.where"]
    assert "Use loss" in found["algorithm.kl.where"]
    assert build({**changes, "algorithm.kl": {"where": "loss", "coefficient": 0.1}})


# --- correction


@pytest.mark.parametrize("key", ["low", "high"])
def test_bounds_are_refused_without_a_correction(key: str) -> None:
    found = refusals({"algorithm.correction": {"method": "none", key: 0.9}})
    assert (
        found[f"algorithm.correction.{key}"] == "has no effect while algorithm.correction.method is none. Leave it out"
    )


@pytest.mark.parametrize("method", ["token_truncate", "sequence_truncate", "decoupled"])
def test_a_lower_bound_is_refused_for_methods_that_do_not_read_it(method: str) -> None:
    found = refusals({"algorithm.correction": {"method": method, "low": 0.1}})
    assert "has no effect" in found["algorithm.correction.low"]
    assert "token_mask, sequence_mask, geometric_mask" in found["algorithm.correction.low"]
    assert build({"algorithm.correction": {"method": method, "high": 5}})


@pytest.mark.parametrize("method", ["token_mask", "sequence_mask", "geometric_mask"])
def test_bounds_of_a_mask_are_in_order(method: str) -> None:
    found = refusals({"algorithm.correction": {"method": method, "low": 1.5, "high": 1.5}})
    assert "low 1.5 is not below high 1.5" in found["algorithm.correction.low"]
    found = refusals({"algorithm.correction": {"method": method, "high": 0.5}})
    assert "low 0.5 is not below high 0.5" in found["algorithm.correction.high"]
    assert build({"algorithm.correction": {"method": method, "low": 0.99, "high": 1.01}})


def test_log_probs_of_the_engine_leave_nothing_to_correct() -> None:
    found = refusals({"algorithm.old_logprobs": "engine"})
    assert "token_truncate" in found["algorithm.old_logprobs"]
    assert "Set algorithm.correction.method: none as well" in found["algorithm.old_logprobs"]
    assert build({"algorithm.old_logprobs": "engine", "algorithm.correction.method": "none"})
    assert build({"algorithm.old_logprobs": "recompute"})


def test_decoupled_ppo_needs_a_loss_with_a_ratio(registered: None) -> None:
    correction = {"algorithm.correction.method": "decoupled"}
    for loss in ("reinforce", "plain"):
        found = refusals({**correction, "algorithm.loss": loss})
        assert f"algorithm.loss {loss} has none. Use token_truncate" in found["algorithm.correction.method"]
    assert build({**correction, "algorithm.loss": "ppo"})
    assert build({"algorithm.correction.method": "token_mask", "algorithm.loss": "reinforce"})


# --- rewards on the way in


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [
        ("grpo", "does not change with the scale of rewards"),
        ("reinforce_plus_plus_baseline", "does not change with the scale of rewards"),
        ("maxrl", "needs rewards of at least 0"),
        ("remax", "a greedy response, which is not whitened"),
    ],
)
def test_whitened_rewards_are_refused_where_they_change_nothing_or_make_no_sense(advantage: str, reason: str) -> None:
    found = refusals({"algorithm.advantage": advantage, "reward.shaping.whiten": True})
    assert reason in found["reward.shaping.whiten"]
    assert "another advantage" in found["reward.shaping.whiten"]


@pytest.mark.parametrize("advantage", ["gae", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_plus_plus"])
def test_whitened_rewards_are_accepted_where_their_scale_matters(advantage: str) -> None:
    assert build({"algorithm.advantage": advantage, "reward.shaping.whiten": True})


def test_grpo_takes_whitened_rewards_where_something_else_has_a_scale() -> None:
    whiten = {"reward.shaping.whiten": True}
    assert build({**whiten, "algorithm.normalize": "none"})
    assert build({**whiten, "algorithm.kl": {"where": "reward", "coefficient": 0.1}})


# --- models that the algorithm calls for


def test_a_reference_is_needed_for_kl_only() -> None:
    assert not needs_reference(build({}))
    assert needs_reference(build({"algorithm.kl": {"where": "loss", "coefficient": 0.01}, "reference": {"ranks": 2}}))
    assert build({"reference": {"ranks": 1}}).reference.ranks == 1  # the default, restated
    assert "none is started" in refusals({"reference": {"ranks": 2}})["reference"]


def test_a_critic_is_needed_for_gae_only() -> None:
    assert needs_critic(build({**GAE, "critic": {"ranks": 2, "warmup_batches": 3}}))
    assert not needs_critic(build({"critic": {"ranks": 1}}))  # the default, restated
    found = refusals({"critic": {"ranks": 2}})
    assert "algorithm.advantage grpo needs no critic, so none is started" in found["critic"]
    assert "algorithm.advantage: gae" in found["critic"]


def test_a_critic_from_the_reward_model_needs_one() -> None:
    changes: dict[str, Any] = {**GAE, "critic.model": "reward"}
    found = refusals(changes)
    assert "no reward model that the critic could start from" in found["critic.model"]
    assert "Set reward.model" in found["critic.model"]
    assert build({**changes, "reward.model": {"path": "org/rm"}}).critic.model == "reward"
