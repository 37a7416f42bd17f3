"""Router, seeds and the pool around scripted engines."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf.cluster.wait import DeadlineExceeded
from rlhf.config import Config
from rlhf.rollout.engine import EngineDied, RequestAborted, RolloutEngine, engine_arguments, token_versions
from rlhf.rollout.masks import IncompleteSupport, SampledLogprobs, early_stop_mask, support_mask
from rlhf.rollout.pool import RolloutFailed, RolloutPool
from rlhf.rollout.types import Completion, EngineSpec, SampleFault, Sampling, sample_seed
from rlhf.trajectories import Prompt, PromptDraw

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop=(), max_new_tokens=4)


def test_a_samples_seed_depends_on_run_seed_draw_and_place_alone():
    seeds = {sample_seed(r, d, s) for r in range(5) for d in range(20) for s in range(8)}
    assert len(seeds) == 5 * 20 * 8
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


class ScriptedEngine:
    """Stands in for an engine actor: answers with the prompt's last id after a scripted delay."""

    def __init__(self, index, delay=lambda request: 0.0, fail=None):
        self.index, self.delay, self.fail, self.held, self.most = index, delay, fail, 0, 0
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._remote))
        self.aborted, self.requests, self.batches = [], [], []
        self.announce = SimpleNamespace(remote=self._announce)
        self.abort = SimpleNamespace(remote=self.aborted.append)

    def _remote(self, request):
        self.requests.append(request.request_id)
        return self._answer(request), ("columns", request.prompt_ids)

    async def _announce(self, request_ids):
        # Slow, as a call to another process is: what was announced may not come before this has returned.
        await asyncio.sleep(0.01)
        assert not set(request_ids) & set(self.requests)
        self.batches.append(request_ids)

    async def _answer(self, request):
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(self.delay(request))
        self.held -= 1
        failure = self.fail(request) if callable(self.fail) else self.fail
        if failure is not None:
            raise failure
        return Completion(request.request_id, request.prompt_ids[-1], "stop", 0, self.index)


def draws(n):
    return [PromptDraw(Prompt(f"p{i}", str(i), (9, i + 1)), draw_index=i, epoch=0) for i in range(n)]


async def collect(pool, n, samples):
    return [group async for group in pool.stream(draws(n), samples, SAMPLING)]


async def test_answers_stay_with_their_prompts_when_engines_finish_out_of_order():
    # Seven prompts over two engines, an early one made slow: order of completion is not order of draws.
    slow = lambda request: 0.05 if request.prompt_ids[-1] == 2 else 0.001 * (request.prompt_ids[-1] % 3)  # noqa: E731
    pool = RolloutPool([ScriptedEngine(0, slow), ScriptedEngine(1, slow)], run_seed=1, deadline_s=5)
    groups = await collect(pool, 7, 3)
    assert sorted(g.group_id for g in groups) == list(range(7))
    assert groups[-1].group_id == 1
    for group in groups:
        assert [t.sample_index for t in group.trajectories] == [0, 1, 2]
        for t in group.trajectories:
            assert t.group_id == group.group_id
            assert t.response_tokens == group.draw.prompt.token_ids[-1]
            assert t.columns == ("columns", group.draw.prompt.token_ids)


async def test_the_pool_never_overfills_an_engine():
    engines = [ScriptedEngine(i, lambda request: 0.001) for i in range(2)]
    pool = RolloutPool(engines, run_seed=1, deadline_s=5, slots=3)
    groups = await collect(pool, 10, 4)
    assert sum(len(g.trajectories) for g in groups) == 40
    assert max(e.most for e in engines) == 3


async def test_a_request_that_is_never_answered_ends_at_its_deadline_and_is_named():
    engine = ScriptedEngine(0, lambda request: 3600)
    pool = RolloutPool([engine], run_seed=1, deadline_s=0.05, attempts=2)
    with pytest.raises(
        RolloutFailed, match=r"failed on 2 engine\(s\), the last: .*train-0-0 on engine 0: not done after"
    ):
        await collect(pool, 1, 1)
    assert engine.aborted == ["train-0-0", "train-0-0"]


async def test_a_request_goes_to_another_engine_when_its_own_does_not_answer():
    stuck, good = ScriptedEngine(0, lambda request: 3600), ScriptedEngine(1)
    pool = RolloutPool([stuck, good], run_seed=1, deadline_s=0.05)
    told = []
    pool.on_outcome = lambda engine, error: told.append((engine, type(error)))
    (group,) = await collect(pool, 1, 1)
    assert [t.engine for t in group.trajectories] == [1]
    assert told == [(0, DeadlineExceeded), (1, type(None))]
    assert pool.retries == 1


async def test_a_fault_of_the_fleet_is_retried_a_bounded_number_of_times():
    engine = ScriptedEngine(0, fail=RuntimeError("engine 0 is gone"))
    pool = RolloutPool([engine], run_seed=1, deadline_s=5, attempts=3)
    with pytest.raises(RolloutFailed, match="engine 0 is gone"):
        await collect(pool, 1, 1)
    assert engine.requests == ["train-0-0"] * 3


async def test_a_fault_of_the_sample_is_not_retried_and_ends_the_stream():
    engine = ScriptedEngine(0, fail=SampleFault("the prompt is too long"))
    pool = RolloutPool([engine], run_seed=1, deadline_s=5)
    with pytest.raises(SampleFault, match="too long"):
        await collect(pool, 1, 1)
    assert engine.requests == ["train-0-0"]


async def test_a_sample_at_fault_is_reported_in_its_group_where_the_configuration_says_drop():
    faulty = lambda request: SampleFault("no") if request.request_id == "train-1-0" else None  # noqa: E731
    pool = RolloutPool([ScriptedEngine(0, fail=faulty)], run_seed=1, deadline_s=5, on_error="drop")
    groups = {g.group_id: g for g in await collect(pool, 2, 3)}
    assert [t.sample_index for t in groups[0].trajectories] == [0, 1, 2] and groups[0].failures == ()
    assert [t.sample_index for t in groups[1].trajectories] == [1, 2] and groups[1].failures == ("no",)


async def test_what_a_lost_engine_had_is_answered_by_the_others_once():
    doomed, other = ScriptedEngine(0, lambda request: 0.2), ScriptedEngine(1, lambda request: 0.01)
    pool = RolloutPool([doomed, other], run_seed=1, deadline_s=5)
    collecting = asyncio.ensure_future(collect(pool, 6, 4))
    await asyncio.sleep(0.05)
    had = len(doomed.requests)
    pool.lose(0, RuntimeError("killed"))
    groups = await collecting
    # The lost engine's answers would have come 0.15 s later; they are nobody's by then.
    await asyncio.sleep(0.3)
    assert had > 0 and pool.retries == had
    samples = [(g.group_id, t.sample_index, t.engine) for g in groups for t in g.trajectories]
    assert sorted((g, s) for g, s, _ in samples) == [(g, s) for g in range(6) for s in range(4)]
    assert {engine for _, _, engine in samples} == {1}


async def test_an_engine_that_is_lost_over_one_late_request_takes_the_other_late_ones_along():
    # All are late at the same moment, and the first of them is the engine's last failure.
    stuck, other = ScriptedEngine(0, lambda request: 3600), ScriptedEngine(1)
    pool = RolloutPool([stuck], run_seed=1, deadline_s=0.05)
    pool.on_outcome = lambda engine, error: pool.lose(engine, error) if error and engine == 0 else None
    collecting = asyncio.ensure_future(collect(pool, 2, 2))
    await asyncio.sleep(0.02)
    pool.open(1, other)
    assert {t.engine for g in await collecting for t in g.trajectories} == {1}


async def test_requests_wait_while_no_engine_serves_and_go_on_with_the_first_that_does():
    pool = RolloutPool(run_seed=1, deadline_s=5)
    collecting = asyncio.ensure_future(collect(pool, 2, 2))
    await asyncio.sleep(0.02)
    assert not collecting.done()
    pool.open(3, ScriptedEngine(3))
    assert {t.engine for g in await collecting for t in g.trajectories} == {3}


async def test_when_no_engine_will_ever_serve_everything_ends_with_the_reason():
    pool = RolloutPool(run_seed=1, deadline_s=5, on_error="drop")
    collecting = asyncio.ensure_future(collect(pool, 2, 2))
    await asyncio.sleep(0.02)
    pool.give_up(RolloutFailed("all four are gone"))
    with pytest.raises(RolloutFailed, match="all four are gone"):
        await collecting
    with pytest.raises(RolloutFailed, match="all four are gone"):
        await collect(pool, 1, 1)


async def test_a_closed_engine_finishes_what_it_has_and_gets_nothing_new():
    closing, other = ScriptedEngine(0, lambda request: 0.05), ScriptedEngine(1, lambda request: 0.05)
    pool = RolloutPool([closing, other], run_seed=1, deadline_s=5, slots=2)
    collecting = asyncio.ensure_future(collect(pool, 4, 2))
    await asyncio.sleep(0.02)
    pool.close(0)
    groups = await collecting
    assert sum(t.engine == 0 for g in groups for t in g.trajectories) == len(closing.requests) == 2


async def test_groups_that_are_given_up_are_aborted_where_they_run_and_named():
    engine = ScriptedEngine(0, lambda request: 0.0 if request.prompt_ids[-1] == 1 else 3600)
    pool = RolloutPool([engine], run_seed=1, deadline_s=3600)
    stream = pool.open_stream(2, SAMPLING)
    stream.add(draws(3))
    assert (await anext(stream)).group_id == 0
    assert stream.pending == 2
    assert [draw.draw_index for draw in await stream.close()] == [1, 2]
    assert sorted(engine.aborted) == ["train-1-0", "train-1-1", "train-2-0", "train-2-1"]
    assert stream.pending == 0


async def test_a_stream_takes_more_while_it_runs():
    pool = RolloutPool([ScriptedEngine(0)], run_seed=1, deadline_s=5)
    stream = pool.open_stream(1, SAMPLING)
    first, second, third = draws(3)
    stream.add([first])
    assert (await anext(stream)).group_id == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    stream.add([second, third])
    assert sorted([g.group_id async for g in stream]) == [1, 2]


async def test_requests_that_queue_for_several_waves_outlive_one_requests_deadline():
    # One slot, five requests of 0.1 s each: the last waits 0.4 s, twice the deadline of one request.
    pool = RolloutPool([ScriptedEngine(0, lambda request: 0.1)], run_seed=1, deadline_s=0.2, slots=1, attempts=1)
    assert len(await collect(pool, 5, 1)) == 5


def test_probe_and_evaluation_have_streams_of_their_own():
    assert len({sample_seed(1, 0, 0, purpose) for purpose in ("train", "probe", "eval0", "eval20")}) == 4
    assert sample_seed(1, 0, 0, "train") == sample_seed(1, 0, 0)


def completion(spans):
    return SimpleNamespace(weight_versions=spans)


def test_every_token_gets_the_version_of_its_span():
    spans = [SimpleNamespace(start=0, end=2, version="4"), SimpleNamespace(start=2, end=3, version="5")]
    assert token_versions(completion(spans), 3) == [4, 4, 5]


@pytest.mark.parametrize("spans", [None, [SimpleNamespace(start=0, end=1, version="4")]])
def test_a_token_of_unknown_version_is_an_error_and_not_version_0(spans):
    with pytest.raises(RuntimeError, match="which weights"):
        token_versions(completion(spans), 2)


def logprobs_of(sampled, candidate_ids, probabilities):
    with np.errstate(divide="ignore"):
        return SampledLogprobs(
            np.log(np.array(sampled, np.float32)),
            np.array(candidate_ids, np.int32),
            np.log(np.array(probabilities, np.float32)),
        )


def test_the_support_is_the_candidates_that_have_a_probability():
    # Two tokens, three candidates each; at the first place the third was cut off, at the second the last two.
    logprobs = logprobs_of([0.25, 1.0], [[8, 3, 5], [2, 8, 3]], [[0.75, 0.25, 0.0], [1.0, 0.0, 0.0]])
    mask = support_mask("a", [3, 2], logprobs)
    assert mask.allowed
    assert mask.offsets.tolist() == [0, 2, 3]
    assert mask.token_ids.tolist() == [8, 3, 2]
    assert (mask.offsets.dtype, mask.token_ids.dtype) == (np.int64, np.int32)


def test_a_support_with_a_missing_tie_is_an_error_that_names_the_request_and_the_place():
    # The second place has three tied tokens of 1/3, and two candidates list 2/3 = 0.666667 of it.
    logprobs = logprobs_of([0.5, 1 / 3], [[1, 2], [1, 2]], [[0.5, 0.5], [1 / 3, 1 / 3]])
    with pytest.raises(IncompleteSupport, match=r"request train-3-1: .* response token 1 have probability 0\.666667"):
        support_mask("train-3-1", [1, 2], logprobs)


@pytest.mark.parametrize("sampled", [9, 2])
def test_a_support_without_the_sampled_token_is_an_error(sampled):
    # 9 is no candidate at all, 2 one that was cut off.
    logprobs = logprobs_of([0.5], [[0, 1, 2]], [[0.5, 0.5, 0.0]])
    with pytest.raises(IncompleteSupport, match=f"do not include the sampled token {sampled}"):
        support_mask("a", [sampled], logprobs)


def test_a_support_with_nan_is_an_error():
    with pytest.raises(IncompleteSupport, match="probability nan"):
        support_mask("a", [1], logprobs_of([0.5], [[1, 2]], [[0.5, np.nan]]))


def test_a_response_without_tokens_has_an_empty_mask():
    flat = SimpleNamespace(token_ids=[], logprobs=[])
    mask = support_mask("a", [], SampledLogprobs.from_vllm(flat, 3))
    assert (mask.offsets.tolist(), mask.token_ids.tolist()) == ([0], [])


def test_vllms_flat_logprobs_are_read_as_sampled_token_and_candidates():
    # Two tokens with two candidates each: (sampled, first, second) twice.
    flat = SimpleNamespace(token_ids=[6, 5, 6, 4, 4, 7], logprobs=[-2.0, -0.5, -2.0, -0.25, -0.25, -np.inf])
    logprobs = SampledLogprobs.from_vllm(flat, 2)
    assert logprobs.sampled_R.tolist() == [-2.0, -0.25]
    assert logprobs.candidate_ids_RC.tolist() == [[5, 6], [4, 7]]
    assert logprobs.candidate_logprobs_RC.tolist() == [[-0.5, -2.0], [-0.25, -np.inf]]


def test_tokens_that_end_a_response_are_not_allowed_before_its_minimum_length():
    # Four tokens, a minimum of two, stop ids 1 and 7: both at places 0 and 1, none at 2 and 3.
    mask = early_stop_mask(4, 2, (1, 7))
    assert not mask.allowed
    assert mask.offsets.tolist() == [0, 2, 4, 4, 4]
    assert mask.token_ids.tolist() == [1, 7, 1, 7]


def test_a_response_cut_before_its_minimum_length_is_masked_to_its_end():
    assert early_stop_mask(2, 5, (1,)).offsets.tolist() == [0, 1, 2]


def test_only_sampling_that_leaves_tokens_out_is_masked():
    def sampling(temperature=1.0, top_p=1.0, top_k=-1, least=0):
        return Sampling(temperature, top_p, top_k, (), 8, least)

    assert not sampling().masked
    assert not sampling(top_k=0).masked
    assert sampling(top_k=5).masked
    assert sampling(top_k=5, top_p=0.9).masked
    assert sampling(least=1).masked
    assert sampling(least=1).candidates == 0


def test_greedy_sampling_is_not_masked():
    greedy = Sampling(1.0, 0.9, 5, (), 8, 2).at_temperature(0.0)
    assert (greedy.masked, greedy.candidates, greedy.min_new_tokens) == (False, 0, 2)


@pytest.mark.parametrize(("top_k", "candidates"), [(1, 17), (32, 48), (1000, 1500)])
def test_more_candidates_are_listed_than_top_k_keeps_without_ties(top_k, candidates):
    # 16 more, or half of k where that is more.
    assert Sampling(1.0, 1.0, top_k, (), 8).candidates == candidates


def test_a_lower_limit_of_tokens_lowers_the_minimum_length_with_it():
    limited = Sampling(1.0, 1.0, -1, (), 24, 6).limited_to(4)
    assert (limited.max_new_tokens, limited.min_new_tokens) == (4, 4)


def test_training_samples_as_the_configuration_says_and_its_engines_list_enough_candidates():
    config = Config.model_validate(
        {
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "reasoning_gym"}]},
            "rollout": {"sampling": {"top_k": 40, "top_p": 0.9}, "min_new_tokens": 3},
        }
    )
    assert Sampling.for_training(config) == Sampling(1.0, 0.9, 40, (), 24, 3)
    spec = EngineSpec.from_config(config, 0, device="cpu", weight_backend="gloo")
    assert spec.max_logprobs == engine_arguments(spec)["max_logprobs"] == 60


async def test_static_assignment_goes_by_the_group_alone_and_announces_what_begins_together():
    # Engine 0 is slow and has half of the groups all the same; the one with two slots has all of its samples at once.
    engines = [ScriptedEngine(0, lambda request: 0.05), ScriptedEngine(1)]
    pool = RolloutPool(engines, run_seed=1, deadline_s=5, slots=2, static_engines=2)
    groups = await collect(pool, 5, 2)
    assert {(t.group_id, t.engine) for g in groups for t in g.trajectories} == {(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)}
    assert engines[0].batches == [[f"train-{group}-{sample}" for group in (0, 2, 4) for sample in (0, 1)]]
    assert engines[1].batches == [[f"train-{group}-{sample}" for group in (1, 3) for sample in (0, 1)]]
    assert engines[0].requests == engines[0].batches[0]


async def test_what_a_lost_engine_had_waits_for_it_under_static_assignment():
    doomed, other = ScriptedEngine(0, lambda request: 0.2), ScriptedEngine(1)
    pool = RolloutPool([doomed, other], run_seed=1, deadline_s=5, static_engines=2)
    collecting = asyncio.ensure_future(collect(pool, 4, 1))
    await asyncio.sleep(0.05)
    pool.lose(0, RuntimeError("killed"))
    again = ScriptedEngine(0)
    await asyncio.sleep(0.02)
    assert not collecting.done()
    pool.open(0, again)
    assert sorted((g.group_id, g.trajectories[0].engine) for g in await collecting) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert again.batches == [["train-0-0", "train-2-0"]]


@pytest.mark.parametrize(
    ("how", "raised"), [("aborted", RequestAborted), ("cancelled", asyncio.CancelledError), ("died", EngineDied)]
)
async def test_a_request_that_vllm_does_not_answer_ends_with_what_ended_it(how, raised):
    engine = RolloutEngine(SimpleNamespace(index=0))
    engine._death = asyncio.get_running_loop().create_future()
    engine._output = lambda request: asyncio.sleep(3600)
    asking = asyncio.ensure_future(engine._run(SimpleNamespace(request_id="a")))
    await asyncio.sleep(0.01)
    if how == "aborted":
        await engine.abort("a")
    elif how == "cancelled":
        asking.cancel()
    else:
        engine._death.set_exception(EngineDied("killed"))
    with pytest.raises(raised):
        await asking
    assert engine._running == {}
