"""One test for each invariant that `rlhf.batching.packing` states, and costs worked out by hand."""

from __future__ import annotations

import random
from heapq import heapreplace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batching.packing import (
    TOLERANCE,
    CostModel,
    _Shares,
    plan_packed,
)
from rlhf.batching.plan import MicroBatch, Plan, SampleLength

COST = CostModel(100.0, 1.0)
TOKENS = CostModel(1.0, 0.0)
Batch = tuple[list[SampleLength], int, int, int]


def sample_of(sample_id: str, group_id: int, prompt: int, response: int) -> SampleLength:
    return SampleLength(sample_id, group_id, prompt + response, prompt)


def group(number: int, prompt: int, *responses: int) -> list[SampleLength]:
    return [sample_of(f"{number}-{i}", number, prompt, response) for i, response in enumerate(responses)]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    prompts = draw(st.lists(st.integers(1, 20), min_size=0, max_size=8))
    samples = [
        sample
        for number, prompt in enumerate(prompts)
        for sample in group(number, prompt, *draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    ]
    # Few ranks and minibatches, so that a rank has several groups to lay into rows.
    return samples, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 100))


def made(batch: Batch) -> Plan:
    samples, ranks, minibatches, max_tokens = batch
    return plan_packed(samples, ranks, minibatches, max_tokens, COST)


def micro_batches(plan: Plan) -> list[MicroBatch]:
    return [row for minibatch in plan.minibatches for rank in minibatch.ranks for row in rank]


def ids_by_rank(plan: Plan) -> list[list[tuple[str, ...]]]:
    (minibatch,) = plan.minibatches
    return [[row.sample_ids for row in rank] for rank in minibatch.ranks]


def rank_costs(plan: Plan, cost: CostModel) -> list[float]:
    (minibatch,) = plan.minibatches
    return [sum(cost.total(row.samples) for row in rank) for rank in minibatch.ranks]


def tokens_of(samples: tuple[SampleLength, ...]) -> int:
    """Every group's prompt once, and all responses."""
    return sum({s.group_id: s.prompt_tokens for s in samples}.values()) + sum(s.response_tokens for s in samples)


@given(batches())
def test_every_sample_is_in_exactly_one_micro_batch(batch: Batch) -> None:
    plan = made(batch)
    placed = [i for row in micro_batches(plan) for i in row.sample_ids]
    assert sorted(placed) == sorted(sample.sample_id for sample in batch[0])
    assert sorted(placed) == sorted(i for minibatch in plan.minibatches for i in minibatch.sample_ids)


@given(batches())
def test_groups_are_in_one_minibatch_unless_there_are_too_few(batch: Batch) -> None:
    samples, _, minibatches, _ = batch
    groups = {sample.group_id for sample in samples}
    homes: dict[int, set[int]] = {}
    for index, minibatch in enumerate(made(batch).minibatches):
        for sample in (s for rank in minibatch.ranks for row in rank for s in row.samples):
            homes.setdefault(sample.group_id, set()).add(index)
    assert len(groups) < minibatches or all(len(home) == 1 for home in homes.values())


@given(batches())
def test_all_ranks_have_equally_many_micro_batches(batch: Batch) -> None:
    for minibatch in made(batch).minibatches:
        assert len(minibatch.ranks) == batch[1]
        assert len({len(rank) for rank in minibatch.ranks}) == 1


@given(batches())
def test_unique_tokens_are_within_the_cap_or_those_of_one_long_sample(batch: Batch) -> None:
    for row in micro_batches(made(batch)):
        assert row.unique_tokens == tokens_of(row.samples)
        assert row.unique_tokens <= batch[3] or len(row.samples) == 1


@given(batches())
def test_longer_sample_is_refused_by_name_where_it_may_not_stand_alone(batch: Batch) -> None:
    samples, ranks, minibatches, max_tokens = batch
    longer = [sample for sample in samples if sample.tokens > max_tokens]
    if not longer:
        assert plan_packed(samples, ranks, minibatches, max_tokens, COST, longer="refuse") == made(batch)
        return
    with pytest.raises(ValueError, match=f"sample {longer[0].sample_id} has {longer[0].tokens} tokens, more than"):
        plan_packed(samples, ranks, minibatches, max_tokens, COST, longer="refuse")


@given(batches())
def test_samples_of_a_group_follow_one_another_in_a_micro_batch(batch: Batch) -> None:
    for row in micro_batches(made(batch)):
        changes = sum(one != other for one, other in zip(row.group_ids, row.group_ids[1:], strict=False))
        assert changes == max(0, len(set(row.group_ids)) - 1)


@given(batches())
def test_what_a_rank_has_of_a_group_is_in_one_micro_batch_where_it_fits(batch: Batch) -> None:
    for rank in (rank for minibatch in made(batch).minibatches for rank in minibatch.ranks):
        members: dict[int, list[SampleLength]] = {}
        homes: dict[int, set[int]] = {}
        for index, row in enumerate(rank):
            for sample in row.samples:
                members.setdefault(sample.group_id, []).append(sample)
                homes.setdefault(sample.group_id, set()).add(index)
        for number, samples in members.items():
            assert tokens_of(tuple(samples)) > batch[3] or len(homes[number]) == 1


@given(batches())
def test_group_that_fits_is_on_one_rank_where_whole_groups_are_even_enough(batch: Batch) -> None:
    samples, ranks, _, _ = batch
    groups: dict[int, list[SampleLength]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    # Longest processing time first, of whole groups.
    loads = [0.0] * ranks
    for cost in sorted((COST.total(members) for members in groups.values()), reverse=True):
        heapreplace(loads, loads[0] + cost)
    even = max(loads) <= (1 + TOLERANCE) * sum(loads) / ranks
    plan = plan_packed(samples, ranks, 1, 1000, COST)
    homes: dict[int, set[int]] = {}
    for minibatch in plan.minibatches:
        for index, rank in enumerate(minibatch.ranks):
            for sample in (s for row in rank for s in row.samples):
                homes.setdefault(sample.group_id, set()).add(index)
    assert not even or all(len(home) == 1 for home in homes.values())


@given(batches())
def test_splitting_groups_never_makes_the_most_expensive_rank_more_expensive(batch: Batch) -> None:
    samples, ranks, _, _ = batch
    if samples:
        split = rank_costs(plan_packed(samples, ranks, 1, 1000, COST), COST)
        whole = rank_costs(plan_packed(samples, ranks, 1, 1000, COST, tolerance=1e9), COST)
        assert max(split) <= max(whole) * (1 + 1e-9)


@given(batches())
def test_cost_that_is_evened_out_is_that_of_the_samples_on_a_rank(batch: Batch) -> None:
    samples, ranks, _, _ = batch
    shares = _Shares([[sample] for sample in samples], ranks, COST)
    shares.even_out(0.0)
    costs = [COST.total(members) for members in shares.samples()]
    assert shares.costs == pytest.approx(costs)
    assert shares.total == pytest.approx(sum(costs))
    assert shares.order == sorted((cost, rank) for rank, cost in enumerate(shares.costs))


@given(batches())
def test_plan_is_the_same_on_every_rank(batch: Batch) -> None:
    assert made(batch) == made(batch)


def test_prompt_is_paid_once_in_a_micro_batch() -> None:
    samples = group(0, 4, 2, 6)
    # Linear: 4 + 2 + 6 = 12 tokens. Pairs: 4 x 4 / 2 = 8 in the prompt, 2 x (4 + 1) = 10 and 6 x (4 + 3) = 42.
    assert CostModel(1.0, 0.0).total(samples) == 12
    assert CostModel(0.0, 1.0).total(samples) == 8 + 10 + 42
    assert CostModel(3.0, 2.0).total(samples) == 3 * 12 + 2 * 60


def test_cost_of_a_sample_alone_is_that_of_its_tokens_and_of_all_pairs() -> None:
    # 10 tokens, 10 x 10 / 2 pairs, wherever the prompt ends.
    assert [CostModel(1.0, 1.0).total(group(0, prompt, 10 - prompt)) for prompt in (1, 4, 9)] == [60] * 3


def test_cost_of_a_decoder() -> None:
    # 2 operations for a parameter; 2 layers x 3 heads x 8 dimensions x (2 for q k + 2 for the weighted sum) = 192.
    assert CostModel.of_decoder(1000, 2, 3, 8) == CostModel(2000.0, 192.0)


def test_cost_of_nothing_is_zero() -> None:
    assert COST.total([]) == 0


def test_group_that_fits_is_one_micro_batch_in_its_order() -> None:
    # 5 + 2 + 4 + 3 = 14 unique tokens, where padded rows would have 27.
    assert ids_by_rank(plan_packed(group(0, 5, 2, 4, 3), 1, 1, 14, TOKENS)) == [[("0-0", "0-1", "0-2")]]


def test_group_that_does_not_fit_is_cut_into_few_parts() -> None:
    # Cap 13 leaves 8 for responses of 7, 1, 4, 4: 7 + 1 and 4 + 4.
    plan = plan_packed(group(0, 5, 7, 1, 4, 4), 1, 1, 13, TOKENS)
    assert sorted(map(sorted, ids_by_rank(plan)[0])) == [["0-0", "0-1"], ["0-2", "0-3"]]


def test_small_groups_fill_a_micro_batch_beside_large_ones() -> None:
    samples = [*group(0, 4, 4), *group(1, 1, 2), *group(2, 3, 4), *group(3, 1, 1)]
    # 8 + 2 and 7 + 3 in micro-batches of 10.
    assert ids_by_rank(plan_packed(samples, 1, 1, 10, TOKENS)) == [[("0-0", "3-0"), ("2-0", "1-0")]]


def test_each_group_in_a_micro_batch_takes_room_from_the_next() -> None:
    samples = [*group(0, 0, 6), *group(1, 0, 3), *group(2, 0, 3)]
    # 6 + 3 leave 1 of 10.
    assert ids_by_rank(plan_packed(samples, 1, 1, 10, TOKENS)) == [[("0-0", "1-0"), ("2-0",)]]


def test_longer_sample_stands_alone_even_beside_an_empty_response() -> None:
    plan = plan_packed(group(0, 5, 9, 0), 1, 1, 10, TOKENS)
    assert ids_by_rank(plan) == [[("0-0",), ("0-1",)]]


def test_empty_response_joins_a_sample_that_fills_a_micro_batch() -> None:
    # 5 + 5 = 10 leaves no room for the response of 1, but for the empty one.
    assert ids_by_rank(plan_packed(group(0, 5, 5, 0, 1), 1, 1, 10, TOKENS)) == [[("0-0", "0-1"), ("0-2",)]]


def test_group_is_split_when_a_rank_would_have_all() -> None:
    plan = plan_packed(group(0, 2, 10, 10, 10, 10), 2, 1, 100, TOKENS)
    # 2 + 20 on each, where the group on one rank would be 42 and 0.
    assert rank_costs(plan, TOKENS) == [22, 22]


def test_every_sample_of_a_group_may_move_to_another_rank() -> None:
    # 30 on one of 10 ranks: 27 of them have to move, one at a time.
    assert rank_costs(plan_packed(group(0, 0, *[1] * 30), 10, 1, 100, TOKENS), TOKENS) == [3] * 10


def test_group_of_the_highest_cost_is_placed_first_with_its_prompt() -> None:
    # 5 + 2 before 1 + 4, though its responses are shorter.
    samples = [*group(0, 1, 4), *group(1, 5, 2)]
    assert ids_by_rank(plan_packed(samples, 2, 1, 100, TOKENS)) == [[("1-0",)], [("0-0",)]]


def test_group_is_not_split_for_less_than_its_prompt() -> None:
    # On 2 ranks 30 + 6 and 30 + 4; a response of 2 elsewhere would bring a prompt of 20 with it.
    samples = [*group(0, 20, 10), *group(1, 20, 10), *group(2, 2, 2, 2), *group(3, 2, 2)]
    plan = plan_packed(samples, 2, 1, 100, TOKENS)
    assert sorted(rank_costs(plan, TOKENS)) == [34, 36]


def test_group_is_not_split_where_the_highest_cost_would_stay() -> None:
    # 4 + 2 on one rank; the empty response elsewhere would cost a prompt there and save nothing here.
    assert ids_by_rank(plan_packed(group(0, 4, 2, 0), 2, 1, 100, TOKENS)) == [[("0-0", "0-1")], [()]]


def test_rank_that_is_as_far_above_the_mean_as_is_tolerated_stays_as_it_is() -> None:
    # 10 and 0: the mean is 5, and 10 is 100 % above it.
    samples = group(0, 0, 5, 5)
    assert ids_by_rank(plan_packed(samples, 2, 1, 100, TOKENS, tolerance=1.0)) == [[("0-0", "0-1")], [()]]
    assert rank_costs(plan_packed(samples, 2, 1, 100, TOKENS, tolerance=0.99), TOKENS) == [5, 5]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Longest first: 11 + 6 + 4 and 9 + 8. 11 for 9 makes both 19.
        ([6, 4, 9, 11, 8], [19, 19]),
        # 27 + 20 + 5 = 52 and 25 + 23: 27 for 25 makes both 50, and 27 for 23 would be 48 and 52.
        ([27, 23, 25, 5, 20], [50, 50]),
        # 16 + 8 and 12 + 10 + 5 = 27: 10 for 8 is 26 and 25, and 12 for 8 would be 28.
        ([12, 10, 8, 5, 16], [26, 25]),
        # 15 + 13 and 15 + 12 + 7 = 34: 15 for 13 is 30 and 32.
        ([13, 7, 15, 15, 12], [30, 32]),
        # 13 + 7 and 10 + 8 + 5 = 23: 8 for 7, the shortest of the other rank, is 21 and 22.
        ([7, 10, 5, 8, 13], [21, 22]),
        # 30 + 20 + 16 = 66 and 26 + 24 + 5 + 1: 30 for 24 is 60 and 62, and then the 1 moves.
        ([30, 16, 20, 1, 5, 26, 24], [61, 61]),
    ],
)
def test_exchange_is_with_the_sample_that_evens_out_most(tokens: list[int], expected: list[int]) -> None:
    samples = [sample_of(str(i), i, 0, t) for i, t in enumerate(tokens)]
    assert rank_costs(plan_packed(samples, 2, 1, 100, TOKENS), TOKENS) == expected


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # 5 + 4 and (4 + 3) + (3 + 3) = 13: against the 4 goes a 3 with its prompt of 3.
        ([*group(0, 0, 5, 4), *group(1, 3, 3), *group(2, 4, 3)], [11, 11]),
        # 1 + 10 + 4 = 15 and (2 + 7) + (2 + 1): the 4 brings a second prompt of 1, the 1 its own of 2.
        ([*group(0, 2, 1), *group(1, 1, 10, 4), *group(2, 2, 7)], [14, 14]),
        # 4 + 10 + 7 = 21 and 5 + 4 + (1 + 3) = 13: 7 for 1 + 3 makes 4 + 10 + (1 + 3) = 18 and 5 + 4 + (4 + 7) = 20,
        # and then the 3 goes back for the 5 with its prompt, as it is alone of its group there too.
        ([*group(0, 4, 7, 10), *group(1, 1, 3), *group(2, 0, 5, 4)], [19, 19]),
    ],
)
def test_prompt_goes_with_the_last_sample_of_its_group(samples: list[SampleLength], expected: list[int]) -> None:
    assert rank_costs(plan_packed(samples, 2, 1, 100, TOKENS), TOKENS) == expected


def test_exchange_evens_out_what_moves_alone_can_not() -> None:
    # Longest first gives 8 + 6 + 5 and 7 + 6 + 4 (19 and 17); 8 + 6 + 4 and 7 + 6 + 5 is 18 on both.
    samples = [sample_of(str(i), i, 0, tokens) for i, tokens in enumerate([8, 7, 6, 6, 5, 4])]
    assert rank_costs(plan_packed(samples, 2, 1, 100, TOKENS), TOKENS) == [18, 18]


def test_cost_decides_and_not_the_number_of_tokens() -> None:
    # Attention costs 16^2 / 2 = 128 for one sample of 16 tokens and 8 for each of 4: 16 of those are as much as it.
    samples = [*group(0, 0, 16), *(sample_of(str(i), i, 0, 4) for i in range(1, 17))]
    plan = plan_packed(samples, 2, 1, 100, CostModel(0.0, 1.0))
    assert rank_costs(plan, CostModel(0.0, 1.0)) == [128, 128]
    assert sorted(len(rank[0]) for rank in ids_by_rank(plan)) == [1, 16]


def test_missing_micro_batches_are_made_between_groups() -> None:
    samples = [*group(0, 0, 10), *group(1, 0, 5), *group(2, 0, 5), *group(3, 0, 3)]
    # 10 and 3 don't fit into one of 10; 5 and 5 would.
    assert ids_by_rank(plan_packed(samples, 2, 1, 10, TOKENS, tolerance=1.0)) == [
        [("0-0",), ("3-0",)],
        [("1-0",), ("2-0",)],
    ]


def test_micro_batch_with_the_most_groups_is_divided_and_the_next_one_stays() -> None:
    samples = [sample_of(str(i), i, 0, tokens) for i, tokens in enumerate([8, 6, 6, 6, 5, 2])]
    # 8 + 2 and 6 on the first rank; 6, 6 and 5 on the other, of which no two fit into one of 10.
    assert ids_by_rank(plan_packed(samples, 2, 1, 10, TOKENS, tolerance=1.0)) == [
        [("0",), ("3",), ("5",)],
        [("1",), ("2",), ("4",)],
    ]


def test_micro_batches_that_no_group_is_left_for_are_empty() -> None:
    samples = [*group(0, 0, 10), *group(1, 1, 4, 4), *group(2, 0, 3)]
    # 10 on the first rank, 9 and 3 on the other; the group of two samples is not divided.
    assert ids_by_rank(plan_packed(samples, 2, 1, 10, TOKENS, tolerance=1.0)) == [
        [("0-0",), ()],
        [("1-0", "1-1"), ("2-0",)],
    ]


def test_micro_batches_of_a_rank_are_in_order_of_cost() -> None:
    samples = [*group(0, 1, 3), *group(1, 1, 8), *group(2, 1, 5)]
    assert ids_by_rank(plan_packed(samples, 1, 1, 9, TOKENS)) == [[("1-0",), ("2-0",), ("0-0",)]]


def test_log_normal_lengths_are_spread_within_two_per_cent() -> None:
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(6, 0.5)) + 1 for _ in range(512)]
    loads = rank_costs(
        plan_packed([sample_of(str(i), i, 0, t) for i, t in enumerate(lengths)], 64, 1, 10**6, COST), COST
    )
    assert max(loads) - min(loads) <= 0.02 * sum(loads) / len(loads)


def test_fewer_samples_than_minibatches_give_fewer_minibatches() -> None:
    assert len(plan_packed(group(0, 1, 5, 5), 1, 4, 10, TOKENS).minibatches) == 2


def test_no_samples_give_no_minibatches() -> None:
    assert plan_packed([], 2, 2, 10, TOKENS) == Plan(())


def test_equal_groups_are_dealt_evenly_to_minibatches() -> None:
    samples = [sample for number in range(4) for sample in group(number, 2, 5, 5, 5)]
    assert [len(m.sample_ids) for m in plan_packed(samples, 1, 2, 100, TOKENS).minibatches] == [6, 6]


def test_sample_that_occurs_twice_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 0-0 is in the batch twice"):
        plan_packed(group(0, 1, 5) * 2, 1, 1, 10, TOKENS)


def test_empty_sample_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 0-0 has 0 tokens"):
        plan_packed(group(0, 0, 0), 1, 1, 10, TOKENS)


def test_prompts_of_different_lengths_in_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="sample b has a prompt of 3 tokens, others of its group 7 of 2"):
        plan_packed([sample_of("a", 7, 2, 1), sample_of("b", 7, 3, 1)], 1, 1, 10, TOKENS)


@pytest.mark.parametrize(
    ("ranks", "minibatches", "max_tokens", "named"),
    [(0, 1, 1, "ranks"), (1, 0, 1, "minibatches"), (1, 1, 0, "max_tokens")],
)
def test_count_below_one_is_refused_by_name(ranks: int, minibatches: int, max_tokens: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is 0: it has to be at least 1"):
        plan_packed([], ranks, minibatches, max_tokens, TOKENS)
