"""The sampler: one endless stream, reproducible, resumable."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import DataError, PromptSampler
from rlhf.trajectories import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", str(index), (index,)) for index in range(count)]


def drawn(sampler: PromptSampler, count: int) -> list[str]:
    return [draw.prompt.text for draw in sampler.draw(count)]


def test_without_shuffling_prompts_come_in_order_and_wrap() -> None:
    sampler = PromptSampler(prompts(3), seed=1, shuffle=False)
    draws = sampler.draw(7)
    assert [d.prompt.text for d in draws] == ["0", "1", "2", "0", "1", "2", "0"]
    assert [d.draw_index for d in draws] == [0, 1, 2, 3, 4, 5, 6]
    assert [d.epoch for d in draws] == [0, 0, 0, 1, 1, 1, 2]


def test_the_ninth_of_nine_prompts_is_used_with_batches_of_eight() -> None:
    sampler = PromptSampler(prompts(9), seed=1)
    first, second = drawn(sampler, 8), drawn(sampler, 8)
    assert set(first) | {second[0]} == {str(i) for i in range(9)}


def test_fewer_prompts_than_a_batch_are_enough() -> None:
    # 5 prompts, batch 8: one whole epoch and three of the next.
    assert sorted(Counter(drawn(PromptSampler(prompts(5), seed=1), 8)).values()) == [1, 1, 2, 2, 2]


@given(count=st.integers(1, 12), batches=st.lists(st.integers(0, 15), max_size=6), seed=st.integers(0, 5))
def test_every_epoch_has_each_prompt_once_however_batches_fall(count: int, batches: list[int], seed: int) -> None:
    sampler = PromptSampler(prompts(count), seed)
    draws = [draw for batch in batches for draw in sampler.draw(batch)]
    assert [d.draw_index for d in draws] == list(range(sum(batches)))
    for epoch in {d.epoch for d in draws}:
        of_epoch = [d.prompt.text for d in draws if d.epoch == epoch]
        assert len(set(of_epoch)) == len(of_epoch)
        assert len(of_epoch) == count or epoch == draws[-1].epoch


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    whole = drawn(PromptSampler(prompts(20), seed=1), 40)
    by_ones = PromptSampler(prompts(20), seed=1)
    assert [drawn(by_ones, 1)[0] for _ in range(40)] == whole
    assert whole[:20] != whole[20:]
    assert drawn(PromptSampler(prompts(20), seed=2), 20) != whole[:20]
    # As it has been from the start: with another order no earlier run could be repeated.
    assert drawn(PromptSampler(prompts(5), seed=1), 5) == ["1", "0", "2", "3", "4"]


def test_a_resumed_stream_goes_on_where_it_stopped() -> None:
    # 6 prompts, batch 2: stop after step 1, the next steps are those of the uninterrupted run.
    whole = PromptSampler(prompts(6), seed=3)
    expected = [whole.draw(2) for _ in range(5)]
    stopped = PromptSampler(prompts(6), seed=3)
    stopped.draw(2)
    resumed = PromptSampler(prompts(6), seed=3)
    resumed.load_state_dict(stopped.state_dict())
    assert [resumed.draw(2) for _ in range(4)] == expected[1:]


def test_a_position_in_another_stream_is_refused() -> None:
    state = PromptSampler(prompts(6), seed=3).state_dict()
    with pytest.raises(DataError, match="seed was 3, is 4"):
        PromptSampler(prompts(6), seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="prompts was 6, is 7"):
        PromptSampler(prompts(7), seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="prompt_ids was"):
        PromptSampler([*prompts(5), Prompt("other", "x", (1,))], seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="shuffle was True, is False"):
        PromptSampler(prompts(6), seed=3, shuffle=False).load_state_dict(state)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSampler([], seed=1)
