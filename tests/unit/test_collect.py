"""A step's groups: what counts, what is replaced, what is left out, and where every sample is meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rewards.types import SampleScore
from rlhf.rollout.pool import RolloutPool
from rlhf.rollout.types import SampleFault
from rlhf.trainers.batch import assemble
from rlhf.trainers.collect import Collector, NothingToLearnFrom, Quota
from rlhf.trajectories import Ledger, Prompt, PromptDraw
from tests.unit.configs import build
from tests.unit.test_rollout import ScriptedEngine


class Prompts:
    """An endless stream: draw i is of a prompt whose last id is i + 1."""

    def __init__(self):
        self.next = 0

    def draw(self, count):
        draws = [PromptDraw(Prompt(f"p{i}", "", (9, i + 1)), i, 0) for i in range(self.next, self.next + count)]
        self.next += count
        return draws


class Roles:
    """A pool over one scripted engine, and rewards by `reward(group_id, sample_index)`."""

    reward_model_weight = 0.0
    score_s = 0.0

    def __init__(self, engine, reward, **pool):
        self.pool = RolloutPool([engine], run_seed=1, deadline_s=30, **pool)
        self.fleet = SimpleNamespace(engines=range(1))
        self.reward = reward

    async def score(self, group, step):
        await asyncio.sleep(self.score_s)
        return [SampleScore(float(self.reward(group.group_id, t.sample_index)), {}) for t in group.trajectories]

    async def reward_model_scores(self, group):
        return None

    async def reference_logprobs(self, group):
        return None


def differing(group, sample):
    return sample % 2


class Bench:
    """A collector with everything around it, and the ledger balanced after each step."""

    def __init__(self, *, engine=None, reward=differing, pool=None, **rollout):
        settings = {"prompts_per_step": 2, "samples_per_prompt": 2, **rollout}
        self.config = build({f"rollout.{key}": value for key, value in settings.items()})
        self.ledger, self.prompts = Ledger(), Prompts()
        self.engine = engine or ScriptedEngine(0)
        self.roles = Roles(self.engine, reward, **(pool or {}))
        self.collector = Collector(self.config, self.roles, self.prompts, self.ledger)

    async def step(self, number=1):
        collected = await self.collector.collect(number)
        self.ledger.check()
        self.batch = assemble(collected.scored, self.config, weight_version=0, greedy=collected.greedy)
        self.ledger.settle("failed", self.batch.failed)
        self.ledger.settle("filtered", self.batch.filtered)
        self.ledger.settle("trained", len(self.batch.samples))
        self.ledger.check()
        assert self.ledger.buffered == 0
        self.figures = collected.figures
        return sorted({s.sample.group_id for s in self.batch.samples})


async def test_a_step_draws_what_it_needs_and_trains_on_all_of_it():
    bench = Bench()
    assert await bench.step() == [0, 1]
    assert await bench.step() == [2, 3]
    assert (bench.ledger.drawn, bench.ledger.trained) == (8, 8)


def slow_for(*groups):
    """Prompts of these groups take an hour, the others no time."""
    return ScriptedEngine(0, lambda request: 3600 if request.prompt_ids[-1] - 1 in groups else 0)


async def test_with_over_generation_a_step_takes_the_first_complete_groups_and_aborts_the_rest():
    bench = Bench(engine=slow_for(1), over_generation={"groups": 1, "rest": "abort"})
    assert await bench.step() == [0, 2]
    assert sorted(bench.engine.aborted) == ["train-1-0", "train-1-1"]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.discarded, bench.ledger.in_flight) == (6, 4, 2, 0)


async def test_groups_that_are_carried_over_come_first_in_the_next_step_and_are_drawn_no_second_time():
    bench = Bench(engine=slow_for(1), over_generation={"groups": 1})
    assert await bench.step() == [0, 2]
    assert (bench.ledger.drawn, bench.ledger.in_flight) == (6, 2)
    bench.engine.delay = lambda request: 0
    # Group 1 and two fresh ones begin; the step takes two of the three.
    assert await bench.step() == [1, 3]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.in_flight) == (10, 8, 2)
    bench.collector.finish()
    bench.ledger.check()
    assert (bench.ledger.in_flight, bench.ledger.discarded) == (0, 2)


async def test_dynamic_sampling_replaces_groups_whose_rewards_are_equal_with_fresh_prompts():
    solved = lambda group, sample: 1 if group in (0, 2) else sample % 2  # noqa: E731
    bench = Bench(reward=solved, dynamic_sampling={"enabled": True})
    assert await bench.step() == [1, 3]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.filtered) == (8, 4, 4)
    assert (bench.figures["rollout/groups_drawn"], bench.figures["rollout/groups_replaced"]) == (4, 2)


async def test_dynamic_sampling_stops_at_its_limit_with_the_numbers():
    bench = Bench(reward=lambda group, sample: 1, dynamic_sampling={"enabled": True, "max_factor": 3})
    with pytest.raises(NothingToLearnFrom, match=r"of 6 groups only 0 had rewards that differ, and 2 are needed"):
        await bench.step()
    assert bench.prompts.next == 6


async def test_dynamic_sampling_trains_on_what_it_found_where_the_configuration_says_so():
    one_differs = lambda group, sample: sample % 2 if group == 3 else 1  # noqa: E731
    bench = Bench(reward=one_differs, dynamic_sampling={"enabled": True, "max_factor": 3, "at_limit": "train"})
    assert await bench.step() == [3]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.filtered) == (12, 2, 10)


async def test_a_finished_group_that_dynamic_sampling_does_not_need_is_carried_over_too():
    bench = Bench(dynamic_sampling={"enabled": True}, over_generation={"groups": 3})
    assert len(await bench.step()) == 2
    # All five came in; two were taken, three are to be generated anew with the next weights.
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.in_flight) == (10, 4, 6)


async def test_a_surplus_group_of_which_a_sample_failed_is_not_generated_anew():
    faulty = ScriptedEngine(0, fail=lambda request: SampleFault("no") if request.request_id == "train-4-0" else None)
    bench = Bench(
        engine=faulty,
        pool={"on_error": "drop"},
        dynamic_sampling={"enabled": True},
        over_generation={"groups": 3},
    )
    bench.roles.score_s = 0.05  # all five groups come in before the first is judged
    await bench.step()
    # Groups 2 and 3 are carried over; of group 4 one sample has failed and the other is discarded.
    ledger = bench.ledger
    assert (ledger.drawn, ledger.trained, ledger.failed, ledger.discarded, ledger.in_flight) == (10, 4, 1, 1, 4)


async def test_a_sample_that_can_not_be_generated_is_failed_and_its_group_goes_on_with_the_others():
    faulty = ScriptedEngine(0, fail=lambda request: SampleFault("no") if request.request_id == "train-0-2" else None)
    bench = Bench(engine=faulty, pool={"on_error": "drop"}, samples_per_prompt=4)
    assert await bench.step() == [0, 1]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.failed) == (8, 7, 1)


async def test_a_group_of_which_nothing_could_be_generated_is_failed_as_a_whole():
    faulty = ScriptedEngine(0, fail=lambda request: SampleFault("no") if request.prompt_ids[-1] == 1 else None)
    bench = Bench(engine=faulty, pool={"on_error": "drop"})
    assert await bench.step() == [1]
    assert (bench.ledger.drawn, bench.ledger.trained, bench.ledger.failed) == (4, 2, 2)


async def test_a_failing_score_ends_the_step_with_its_own_error():
    def broken(group, sample):
        raise ZeroDivisionError("the reward is broken")

    with pytest.raises(ZeroDivisionError, match="broken"):
        await asyncio.wait_for(Bench(reward=broken, engine=slow_for(1)).step(), 5)


@given(
    wanted=st.integers(1, 6),
    extra=st.integers(0, 6),
    factor=st.integers(2, 5),
    verdicts=st.lists(st.booleans(), max_size=60),
)
def test_a_quota_never_draws_beyond_its_limit_and_ends_full_or_spent(wanted, extra, factor, verdicts):
    quota = Quota(wanted, extra, max(wanted + extra, factor * wanted))
    for verdict in [*verdicts, *[False] * 60]:
        quota.drawn += quota.to_draw()
        assert quota.drawn <= quota.limit
        if quota.full or quota.spent:
            break
        quota.accepted += verdict
        quota.rejected += not verdict
    assert quota.full or quota.spent
    assert not (quota.full and quota.spent)
