"""Replay of sampling masks: log-probs of the distribution that was sampled from, entropy of the full one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.models.batch import pad_batch
from rlhf.models.logprobs import HeadShape, token_logprobs
from rlhf.models.masks import TokenMask
from rlhf.models.policy import PolicyModel
from rlhf.trajectories import Columns, SamplingMask

PLAIN = HeadShape()


def sampling_mask(ids: Sequence[Sequence[int]], allowed: bool) -> SamplingMask:
    """A mask with these ids for each response token."""
    offsets = np.cumsum([0, *(len(part) for part in ids)]).astype(np.int64)
    return SamplingMask(offsets, np.array([i for part in ids for i in part], dtype=np.int32), allowed)


def columns(prompt: list[int], response: list[int], mask: SamplingMask | None = None) -> Columns:
    return Columns.from_completion(prompt, response, [-1.0] * len(response), 0, mask)


def token_mask(ids: Sequence[Sequence[int]], allowed: bool) -> TokenMask:
    mask = sampling_mask(ids, allowed)
    return TokenMask(torch.from_numpy(mask.offsets), torch.from_numpy(mask.token_ids.astype(np.int64)), allowed)


@pytest.mark.parametrize(("ids", "allowed"), [([0, 2], True), ([1], False)])
def test_log_probs_are_of_the_ids_that_could_be_sampled_and_the_entropy_of_all(ids: list[int], allowed: bool) -> None:
    # p = (1/2, 1/4, 1/4) and id 1 could not be sampled: id 0 had 1/2 of the 3/4 that are left, ln(2/3).
    # Entropy of all three: 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2. Of the two that are left it would be 0.6365.
    hidden = torch.tensor([[0.5, 0.25, 0.25]]).log()
    value, entropy = token_logprobs(
        hidden, torch.eye(3), None, torch.tensor([0]), 1.0, PLAIN, mask=token_mask([ids], allowed)
    )
    assert value.item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


def test_no_gradient_reaches_the_logit_of_an_id_that_could_not_be_sampled() -> None:
    # d log p(0) / d logit = onehot - p over what is left: 1 - 2/3, 0 for id 1, -1/3.
    hidden = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    value, _ = token_logprobs(
        hidden, torch.eye(3), None, torch.tensor([0]), 1.0, PLAIN, mask=token_mask([[1]], allowed=False)
    )
    value.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[0].tolist() == pytest.approx([1 / 3, 0.0, -1 / 3], abs=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("shape", [PLAIN, HeadShape(softcap=3.0), HeadShape(scale=0.25)], ids=["plain", "cap", "scale"])
def test_chunks_give_the_masked_values_and_gradients(rows: int, allowed: bool, shape: HeadShape) -> None:
    torch.manual_seed(0)
    hidden, weight, bias, upstream = torch.randn(5, 16), torch.randn(11, 16), torch.randn(11), torch.randn(2, 5)
    targets = torch.tensor([3, 0, 10, 4, 3])
    others = [[1], [], [2, 4, 6], [9, 0], [1, 5]]
    ids = [[int(target), *other] for target, other in zip(targets, others, strict=True)] if allowed else others
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    expected_leaves = [leaf.double().requires_grad_() for leaf in (hidden, weight, bias)]

    value, entropy = token_logprobs(*leaves, targets, 0.7, shape, rows, token_mask(ids, allowed))
    logits = torch.nn.functional.linear(*expected_leaves) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    logits = logits / 0.7
    left_out = torch.zeros(5, 11, dtype=torch.bool)
    for row, listed in enumerate(ids):
        left_out[row, listed] = True
    left_out = ~left_out if allowed else left_out
    expected = torch.log_softmax(logits.masked_fill(left_out, -torch.inf), -1)[torch.arange(5), targets]
    everything = torch.log_softmax(logits, -1)
    expected_entropy = -(everything.exp() * everything).sum(-1)

    torch.testing.assert_close(value, expected.float())
    torch.testing.assert_close(entropy, expected_entropy.float())
    gradients = torch.autograd.grad((value * upstream[0] + entropy * upstream[1]).sum(), leaves)
    total = (expected * upstream[0] + expected_entropy * upstream[1]).sum()
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(total, expected_leaves), strict=True):
        torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-4, atol=1e-5)


def test_a_target_that_could_not_be_sampled_is_an_error_and_not_minus_infinity() -> None:
    with pytest.raises(ValueError, match="response token 1 of the batch is 2, which its sampling mask leaves out"):
        token_logprobs(
            torch.zeros(2, 3), torch.eye(3), None, torch.tensor([0, 2]), 1.0, PLAIN, mask=token_mask([[], [2]], False)
        )


class TestJoining:
    def test_ids_follow_their_tokens_over_samples(self) -> None:
        batch = pad_batch(
            [
                columns([5, 6], [7, 8], sampling_mask([[7, 9], [8]], allowed=True)),
                columns([5], [4], sampling_mask([[1, 4, 2]], allowed=True)),
            ],
            "cpu",
        )
        assert batch.mask is not None and batch.mask.allowed
        assert batch.mask.offsets_N1.tolist() == [0, 2, 3, 6]
        assert batch.mask.token_ids.tolist() == [7, 9, 8, 1, 4, 2]

    def test_a_sample_without_a_mask_excludes_nothing_beside_one_that_does(self) -> None:
        batch = pad_batch(
            [columns([5], [7, 8]), columns([5], [4, 2], sampling_mask([[2, 3], []], allowed=False))], "cpu"
        )
        assert batch.mask is not None and not batch.mask.allowed
        assert batch.mask.offsets_N1.tolist() == [0, 0, 0, 2, 2]
        assert batch.mask.token_ids.tolist() == [2, 3]

    def test_samples_without_masks_and_an_empty_batch_have_none(self) -> None:
        assert pad_batch([columns([5], [7])], "cpu").mask is None
        assert pad_batch([], "cpu").mask is None

    @pytest.mark.parametrize("other", [None, sampling_mask([[9]], allowed=False)], ids=["none", "excluded"])
    @pytest.mark.parametrize("first", [True, False])
    def test_allowed_ids_beside_another_kind_are_refused_with_the_sample(
        self, other: SamplingMask | None, first: bool
    ) -> None:
        rows = [columns([5], [7], sampling_mask([[7]], allowed=True)), columns([5], [7], other)]
        ids = ["4-0", "4-1"]
        with pytest.raises(ValueError, match=r"sample 4-1 has .* a batch has one kind"):
            pad_batch(rows if first else rows[::-1], "cpu", ids if first else ids[::-1])

    @pytest.mark.parametrize(("ids", "allowed"), [([[5], [8]], True), ([[], []], True), ([[7], []], False)])
    def test_a_sampled_token_that_its_mask_leaves_out_is_refused_with_the_sample(
        self, ids: list[list[int]], allowed: bool
    ) -> None:
        with pytest.raises(ValueError, match="row 0: response token 0 is 7, which its sampling mask leaves out"):
            pad_batch([columns([5], [7, 8], sampling_mask(ids, allowed))], "cpu")

    def test_a_mask_of_another_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"row 0: its sampling mask is for 1 tokens .* its response has 2 tokens"):
            pad_batch([columns([5], [7, 8], sampling_mask([[7]], allowed=True))], "cpu")
        cut = SamplingMask(np.array([0, 1, 3]), np.array([7, 8], dtype=np.int32), allowed=True)
        with pytest.raises(ValueError, match="offsets cover 0 to 3"):
            pad_batch([columns([5], [7, 8], cut)], "cpu")


@pytest.fixture(scope="module")
def lm(tiny_untied: Any) -> Any:
    from rlhf.models.load import load_causal_lm

    return load_causal_lm(str(tiny_untied), "float32")


def test_a_model_replays_each_rows_own_mask(lm: Any) -> None:
    # Rows of different lengths, so that a mask applied by padded position instead of by token would show.
    allowed = [[84, 7, 30], [7, 1, 99]], [[2, 3]]
    rows = [
        columns([5, 76, 5], [84, 7], sampling_mask(allowed[0], allowed=True)),
        columns([9] * 6, [2], sampling_mask(allowed[1], allowed=True)),
    ]
    with torch.no_grad():
        value, _ = PolicyModel(lm)(pad_batch(rows, "cpu"), 0.5)
        expected = [
            _masked(lm, row, [*row.token_ids].index(token), token, ids)
            for row, part in zip(rows, allowed, strict=True)
            for token, ids in zip(row.token_ids[row.loss_mask].tolist(), part, strict=True)
        ]
    assert value.tolist() == pytest.approx(expected, abs=2e-5)


def _masked(lm: Any, row: Columns, position: int, token: int, ids: list[int]) -> float:
    logits: Tensor = lm(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0, position - 1] / 0.5
    return float(logits[token] - torch.logsumexp(logits[ids], -1))
