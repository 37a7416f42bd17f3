"""Useful, duplicated and padding tokens, counted by hand."""

from __future__ import annotations

from rlhf.batching import MicroBatch, Minibatch, SampleLength
from rlhf.batching.work import TokenCounts, count_tokens


def sample(group: int, index: int, prompt: int, response: int) -> SampleLength:
    return SampleLength(f"{group}-{index}", group, prompt + response, prompt)


# Two groups with prompts of 10 and 6 tokens. 10 + 4 + 2 + 3 + 6 + 5 = 30 useful tokens.
FIRST = [sample(0, 0, 10, 4), sample(0, 1, 10, 2), sample(0, 2, 10, 3)]
SECOND = [sample(1, 0, 6, 5)]


def minibatch(*ranks: list[list[SampleLength]]) -> Minibatch:
    return Minibatch(tuple(tuple(MicroBatch(tuple(row)) for row in rank) for rank in ranks))


def test_packed_row_of_whole_groups_has_nothing_but_useful_tokens() -> None:
    assert count_tokens(minibatch([FIRST + SECOND]), packed=True) == TokenCounts(useful=30)


def test_prompt_of_a_group_on_two_ranks_is_duplicated_once() -> None:
    counts = count_tokens(minibatch([FIRST[:2]], [FIRST[2:] + SECOND]), packed=True)
    assert counts == TokenCounts(useful=30, duplicated=10)


def test_padded_rows_have_a_prompt_for_each_sample_and_padding_up_to_the_longest() -> None:
    # Samples of 14, 12, 13 and 11 tokens: 50, of which 30 are useful. Four rows of 14 are 56.
    counts = count_tokens(minibatch([FIRST + SECOND]), packed=False)
    assert counts == TokenCounts(useful=30, duplicated=20, padding=6)
    assert counts.computed == 56


def test_row_of_a_rank_without_samples_is_padding() -> None:
    assert count_tokens(minibatch([SECOND], [[]]), packed=True) == TokenCounts(useful=11, padding=2)
    assert count_tokens(minibatch([SECOND], [[]]), packed=False) == TokenCounts(useful=11, padding=2)


def test_counts_of_minibatches_add_up() -> None:
    assert TokenCounts(1, 2, 3) + TokenCounts(10, 20, 30) == TokenCounts(11, 22, 33)
