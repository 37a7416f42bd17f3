"""Operations of a training pass: by hand, and against what torch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhf.batching import SampleLength
from rlhf.models.load import load_causal_lm
from rlhf.models.operations import Operations
from rlhf.models.packed import synthetic_packed_batch
from rlhf.models.policy import PolicyModel
from rlhf.models.value import load_value_model
from tests.tiny import make_tiny_model

# A token 10, a response token 100, a pair 1.
PLAIN = Operations(10.0, 100.0, 1.0, (None, None))


def sample(group: int, prompt: int, response: int) -> SampleLength:
    return SampleLength(f"{group}-{prompt}-{response}", group, prompt + response, prompt)


def test_tokens_response_tokens_and_pairs_of_one_sample() -> None:
    # 5 tokens, 3 of the response. Pairs: 1 + 2 + 3 + 4 + 5 = 15 in each of two layers.
    assert PLAIN.total([sample(0, 2, 3)]) == 5 * 10 + 3 * 100 + 2 * 15


def test_prompt_counts_once_for_its_group() -> None:
    # Group 0: prompt 2, responses 3 and 1: 6 tokens, 4 of responses; pairs 3 for the prompt, 3 + 4 + 5 = 12 and 3.
    # Group 1: prompt 1, response 1: 2 tokens, pairs 1 + 2.
    expected = (6 + 2) * 10 + (4 + 1) * 100 + 2 * (3 + 12 + 3 + 3)
    assert PLAIN.total([sample(0, 2, 3), sample(1, 1, 1), sample(0, 2, 1)]) == expected


def test_pairs_beyond_a_sliding_window_do_not_count() -> None:
    # Window 2, five tokens: 1 + 2 + 2 + 2 + 2 = 9; without one 15.
    windowed = Operations(0.0, 0.0, 1.0, (2, None))
    assert windowed.total([sample(0, 2, 3)]) == 9 + 15


def test_no_samples_take_no_operations() -> None:
    assert PLAIN.total([]) == 0


# hidden 128, MLP 256, 4 heads of 32, 2 KV heads. q, o 2 x 128 x 128 + k, v 2 x 128 x 64 + MLP 3 x 128 x 256 = 147,456.
BODY = 2 * 147_456
HEAD = 104 * 128


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return PolicyModel(load_causal_lm(str(make_tiny_model(tmp_path, tied=request.param)), "float32"))


def test_matrices_of_layers_and_the_head_take_six_a_parameter_and_an_embedding_none(policy: Any) -> None:
    assert Operations.of(policy) == Operations(6 * BODY, 6 * HEAD, 12 * 4 * 32, (None, None))


def test_frozen_matrix_takes_four_a_parameter(policy: Any) -> None:
    # One of two layers: q, k, v, o and three of the MLP.
    policy.lm.model.layers[0].requires_grad_(False)
    assert Operations.of(policy).per_token == 6 * BODY / 2 + 4 * BODY / 2


def test_value_head_has_one_output(tmp_path: Path) -> None:
    model = load_value_model(str(make_tiny_model(tmp_path)), "float32", "new")
    assert Operations.of(model) == Operations(6 * BODY, 6 * 128, 12 * 4 * 32, (None, None))


def test_windows_are_those_of_the_layers(tmp_path: Path) -> None:
    lm = load_causal_lm(str(make_tiny_model(tmp_path, architecture="gemma3")), "float32")
    assert Operations.of(PolicyModel(lm)).windows == (512, None)


def test_matrix_products_are_those_that_torch_counts(policy: Any) -> None:
    # Two groups of three samples, prompt 7, response 5: 44 tokens, 30 of responses. The head's logits are computed
    # again in the backward pass, 2 more a parameter, which is no useful work.
    batch = synthetic_packed_batch(2, 3, 7, 5, "cpu")
    with FlopCounterMode(display=False) as counter:
        policy(batch, 1.0)[0].sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    expected = Operations.of(policy)
    assert products == expected.per_token * 44 + expected.per_prediction * 30 + 2 * HEAD * 30
