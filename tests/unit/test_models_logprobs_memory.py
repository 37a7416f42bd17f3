"""How much memory the log-prob head takes, by torch's own record of what is allocated and given back."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rlhf.cluster.needs import LOGIT_ARRAYS
from rlhf.models.logprobs import HeadShape, token_logprobs

VOCABULARY, HIDDEN = 4096, 32
# Bytes of one token's logits, in which everything is counted here.
ROW = 4 * VOCABULARY


def peak_rows(tokens: int, chunk_rows: int, shape: HeadShape | None = None) -> float:
    """The most that log-probs, entropies and their gradients held at a time, in rows of logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, HIDDEN, generator=generator, requires_grad=True) for size in (tokens, VOCABULARY)
    )
    targets = torch.zeros(tokens, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        values = token_logprobs(hidden, weight, None, targets, 1.0, shape or HeadShape(), chunk_rows=chunk_rows)
        (values[0] + values[1]).sum().backward()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        highest = max(highest, held)
    return highest / ROW


def test_memory_does_not_grow_with_the_tokens_but_for_what_has_no_vocabulary() -> None:
    # 768 tokens more: their gradients are 768 x 32 x 4 bytes = 6 rows; a few numbers a token are less than one.
    assert peak_rows(1024, 16) - peak_rows(256, 16) < 8


@pytest.mark.parametrize(
    ("shape", "arrays"), [(HeadShape(), LOGIT_ARRAYS), (HeadShape(softcap=5.0), LOGIT_ARRAYS + 1)], ids=["", "capped"]
)
def test_memory_grows_with_the_chunk_by_as_many_arrays_as_are_counted(shape: HeadShape, arrays: int) -> None:
    # 192 rows more in a chunk.
    assert peak_rows(1024, 256, shape) - peak_rows(1024, 64, shape) == pytest.approx(arrays * 192, rel=0.01)


def test_one_chunk_of_all_tokens_holds_their_logits() -> None:
    # The control: what a head without chunks would take is seen.
    assert peak_rows(1024, 1024) > LOGIT_ARRAYS * 1024
