"""One test for each invariant that `rlhf.batching.plan` states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batching import Plan, SampleLength, plan
from rlhf.batching.plan import MicroBatch, unique_tokens


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[SampleLength], int, int, int]:
    groups = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=0, max_size=8))
    samples = [
        SampleLength(f"{group}-{index}", group, tokens)
        for group, members in enumerate(groups)
        for index, tokens in enumerate(members)
    ]
    return samples, draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 100))


def made(batch: tuple[list[SampleLength], int, int, int]) -> Plan:
    samples, ranks, minibatches, max_tokens = batch
    return plan(samples, ranks, minibatches, max_tokens)


@given(batches())
def test_every_sample_is_in_exactly_one_micro_batch(batch: tuple[list[SampleLength], int, int, int]) -> None:
    placed = [i for minibatch in made(batch).minibatches for i in minibatch.sample_ids]
    assert sorted(placed) == sorted(sample.sample_id for sample in batch[0])


@given(batches())
def test_groups_stay_together_unless_there_are_too_few(batch: tuple[list[SampleLength], int, int, int]) -> None:
    samples, _, minibatches, _ = batch
    groups = {sample.group_id for sample in samples}
    if len(groups) >= minibatches:
        homes: dict[str, set[int]] = {}
        for index, minibatch in enumerate(made(batch).minibatches):
            for sample_id in minibatch.sample_ids:
                homes.setdefault(sample_id.split("-")[0], set()).add(index)
        assert all(len(home) == 1 for home in homes.values())


@given(batches())
def test_all_ranks_have_equally_many_micro_batches(batch: tuple[list[SampleLength], int, int, int]) -> None:
    for minibatch in made(batch).minibatches:
        assert len(minibatch.ranks) == batch[1]
        assert len({len(micro_batches) for micro_batches in minibatch.ranks}) == 1


@given(batches())
def test_padded_size_is_within_the_budget_or_one_long_sample(batch: tuple[list[SampleLength], int, int, int]) -> None:
    for minibatch in made(batch).minibatches:
        for micro_batch in (m for rank in minibatch.ranks for m in rank):
            rows = [sample.tokens for sample in micro_batch.samples]
            assert micro_batch.padded_tokens == (len(rows) * max(rows) if rows else 0)
            assert len(rows) <= 1 or micro_batch.padded_tokens <= batch[3]


@given(batches())
def test_longer_sample_is_refused_by_name_where_it_may_not_stand_alone(
    batch: tuple[list[SampleLength], int, int, int],
) -> None:
    samples, ranks, minibatches, max_tokens = batch
    longer = [sample for sample in samples if sample.tokens > max_tokens]
    if not longer:
        assert plan(samples, ranks, minibatches, max_tokens, "refuse") == made(batch)
        return
    with pytest.raises(ValueError, match=f"sample {longer[0].sample_id} has {longer[0].tokens} tokens, more than"):
        plan(samples, ranks, minibatches, max_tokens, "refuse")


@given(batches())
def test_loads_differ_by_at_most_the_longest_sample(batch: tuple[list[SampleLength], int, int, int]) -> None:
    for minibatch in made(batch).minibatches:
        members = [[s.tokens for m in rank for s in m.samples] for rank in minibatch.ranks]
        loads = [sum(tokens) for tokens in members]
        assert max(loads) - min(loads) <= max((t for tokens in members for t in tokens), default=0)


@given(batches())
def test_plan_is_the_same_on_every_rank(batch: tuple[list[SampleLength], int, int, int]) -> None:
    assert made(batch) == made(batch)


def test_tokens_of_a_packed_row_are_all_responses_and_one_prompt_for_each_group() -> None:
    samples = (SampleLength("a", 0, 10, 4), SampleLength("b", 0, 7, 4), SampleLength("c", 1, 5, 2))
    # Responses of 10 - 4, 7 - 4 and 5 - 2 tokens, prompts of 4 and 2.
    assert [sample.response_tokens for sample in samples] == [6, 3, 3]
    assert unique_tokens(samples) == MicroBatch(samples).unique_tokens == 6 + 3 + 3 + 4 + 2


def test_micro_batches_are_filled_with_neighbours_in_length() -> None:
    samples = [SampleLength(str(i), i, tokens) for i, tokens in enumerate([10, 2, 9, 1])]
    (minibatch,) = plan(samples, 1, 1, 20).minibatches
    # 2 x 10 = 20 fits, a third row would not; 2 x 2 fits.
    assert [m.sample_ids for m in minibatch.ranks[0]] == [("0", "2"), ("1", "3")]


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "expected"),
    [
        # Second rank: 2 x 10 = 20 fits into one micro-batch, which is halved as the first rank needs two.
        ([19, 10, 9, 2], 20, [[[19], [2]], [[10], [9]]]),
        # Second rank: 5 and 5, then 3; of these it is the first that is halved.
        ([6, 5, 5, 4, 3, 3, 2], 10, [[[6], [4, 3], [2]], [[5], [5], [3]]]),
        # First rank: nothing to halve, and two micro-batches are missing.
        ([9, 3, 3, 3], 3, [[[9], [], []], [[3], [3], [3]]]),
    ],
)
def test_rank_that_needs_fewer_micro_batches_halves_its_fullest_before_it_adds_empty_ones(
    tokens: list[int], max_tokens: int, expected: list[list[list[int]]]
) -> None:
    (minibatch,) = plan([SampleLength(str(i), i, t) for i, t in enumerate(tokens)], 2, 1, max_tokens).minibatches
    assert [[[sample.tokens for sample in m.samples] for m in rank] for rank in minibatch.ranks] == expected


def test_rank_without_samples_gets_empty_micro_batches() -> None:
    (minibatch,) = plan([SampleLength("a", 0, 5)], 3, 1, 10).minibatches
    assert [[m.sample_ids for m in rank] for rank in minibatch.ranks] == [[("a",)], [()], [()]]


def test_fewer_samples_than_minibatches_give_fewer_minibatches() -> None:
    assert len(plan([SampleLength("a", 0, 5), SampleLength("b", 0, 5)], 1, 4, 10).minibatches) == 2


def test_equal_groups_are_dealt_evenly() -> None:
    samples = [SampleLength(f"{g}-{i}", g, 5) for g in range(4) for i in range(3)]
    assert [len(m.sample_ids) for m in plan(samples, 1, 2, 100).minibatches] == [6, 6]


def test_a_sample_that_occurs_twice_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample a is in the batch twice"):
        plan([SampleLength("a", 0, 5), SampleLength("a", 0, 5)], 1, 1, 10)


def test_a_sample_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample b has 0 tokens: it needs at least one"):
        plan([SampleLength("a", 0, 1), SampleLength("b", 0, 0)], 1, 1, 10)


@pytest.mark.parametrize(
    ("ranks", "minibatches", "max_tokens", "named"),
    [(0, 1, 1, "ranks"), (1, 0, 1, "minibatches"), (1, 1, 0, "max_tokens")],
)
def test_count_below_one_is_refused_by_name(ranks: int, minibatches: int, max_tokens: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is 0: it has to be at least 1"):
        plan([], ranks, minibatches, max_tokens)
