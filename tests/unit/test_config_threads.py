"""Pools that work at the same time share the cores; the others take turns on all of them."""

from __future__ import annotations

from rlhf.config.threads import render_threads, threads
from tests.unit.configs import build


def test_what_works_at_the_same_time_shares_the_cores() -> None:
    # Two engines of two workers: 16 / 4. Three ranks of the policy and one of the critic: 16 / 4.
    changes = {"rollout.engines": 2, "rollout.tensor_parallel": 2, "policy.ranks": 3, "critic.ranks": 1}
    found = threads(build({**changes, "algorithm.advantage": "gae"}), 16)
    assert (found["rollout"], found["policy"], found["critic"]) == (4, 4, 4)
    # Without a critic the policy has 16 // 3 for each rank.
    assert threads(build({"policy.ranks": 3}), 16)["policy"] == 5


def test_engine_and_learner_take_turns_on_all_cores() -> None:
    assert threads(build({}), 2) == {"policy": 2, "critic": 2, "reference": 2, "reward_model": 2, "rollout": 2}


def test_a_process_has_one_thread_at_least_and_in_deterministic_runs_at_most() -> None:
    assert threads(build({"policy.ranks": 3}), 2)["policy"] == 1
    deterministic = build({"run.deterministic": True, "model.dtype": "float32"})
    assert set(threads(deterministic, 16).values()) == {1}


def test_the_line_is_about_the_pools_of_the_run() -> None:
    line = render_threads(build({"rollout.engines": 2}), 8, ["policy", "rollout", "reward"])
    assert line == "threads of a process, on 8 cores (pools take turns): policy 8, rollout 4"
