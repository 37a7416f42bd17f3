"""Token log-probs: the chunked head against the plain formula, and models against their own logits."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.models import logprobs as logprobs_module
from rlhf.models.batch import PaddedBatch, flatten, pad_batch, synthetic_batch, unflatten
from rlhf.models.load import load_causal_lm
from rlhf.models.logprobs import HeadShape, token_logprobs
from rlhf.models.policy import PolicyModel
from rlhf.trajectories import Columns
from tests.tiny import make_tiny_model

PLAIN = HeadShape()


def columns(prompt: list[int], response: list[int]) -> Columns:
    return Columns.from_completion(prompt, response, [-1.0] * len(response), 0)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, shape: HeadShape) -> Tensor:
    """Log-probs over the whole vocabulary, by the book."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.01815), (1.0, -0.12693)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    # Logits 2 and 0: at 0.5 they are 4 and 0, and -ln(1 + e^-4) = -0.01815.
    value, _ = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.eye(2), None, torch.tensor([0]), temperature, PLAIN)
    assert value.item() == pytest.approx(expected, abs=1e-5)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(torch.zeros(1, 2), torch.eye(2), None, torch.tensor([0]), 0.0, PLAIN)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [PLAIN, HeadShape(softcap=3.0), HeadShape(scale=0.25)], ids=["plain", "cap", "scale"])
@pytest.mark.parametrize("loss", ["log-probs", "entropy", "both"])
def test_chunks_give_the_plain_values_and_gradients(rows: int, with_bias: bool, shape: HeadShape, loss: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16), torch.randn(11, 16)
    upstream = torch.randn(2, 7) * torch.tensor([[float(loss != "entropy")], [float(loss != "log-probs")]])
    bias = torch.randn(11) if with_bias else None
    targets = torch.randint(0, 11, (7,))
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    # The book's side in float64, so that what is compared is our error alone.
    expected_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]

    value, entropy = token_logprobs(*(*leaves, None)[:3], targets, 0.7, shape, rows)
    everything = plain(*(*expected_leaves, None)[:3], 0.7, shape)
    expected = everything[torch.arange(7), targets]
    expected_entropy = -(everything.exp() * everything).sum(-1)

    torch.testing.assert_close(value, expected.float())
    torch.testing.assert_close(entropy, expected_entropy.float())
    # An output that a loss doesn't use has no gradient at all, as against one of zeros.
    used = [out * up for out, up in ((value, upstream[0]), (entropy, upstream[1])) if up.any()]
    gradients = torch.autograd.grad(sum(part.sum() for part in used), leaves)
    total = (expected * upstream[0] + expected_entropy * upstream[1]).sum()
    for gradient, expected_gradient in zip(gradients, torch.autograd.grad(total, expected_leaves), strict=True):
        torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-4, atol=1e-5)


def test_gradient_of_the_entropy_of_two_tokens_is_the_closed_form() -> None:
    # Logits (ln 3, 0): p = (3/4, 1/4). H = ln 4 - 3/4 ln 3 = 0.562335.
    # dH/dl_0 = -p_0 (ln p_0 + H) = -0.75 (-0.287682 + 0.562335) = -0.205990, and the two add up to 0.
    hidden = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    _, entropy = token_logprobs(hidden, torch.eye(2), None, torch.tensor([0]), 1.0, PLAIN)
    assert entropy.item() == pytest.approx(0.562335, abs=1e-6)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert gradient[0].tolist() == pytest.approx([-0.205990, 0.205990], abs=1e-6)


def test_a_frozen_head_gets_no_gradient_and_passes_the_same_one_on() -> None:
    torch.manual_seed(0)
    hidden, weight, bias, targets = torch.randn(7, 16), torch.randn(11, 16), torch.randn(11), torch.tensor([3] * 7)
    gradients = []
    for frozen in (False, True):
        states, head, offset = hidden.clone().requires_grad_(), weight.clone(), bias.clone()
        head.requires_grad_(not frozen)
        offset.requires_grad_(not frozen)
        token_logprobs(states, head, offset, targets, 1.0, PLAIN, chunk_rows=3)[0].sum().backward()
        gradients.append(states.grad)
        assert (head.grad is None, offset.grad is None) == (frozen, frozen)
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_entropy_costs_nothing_in_the_backward_pass_of_a_loss_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("the entropy's gradient was computed")

    monkeypatch.setattr(logprobs_module, "_entropy_gradient", refuse)
    hidden = torch.zeros(1, 2, requires_grad=True)
    value, entropy = token_logprobs(hidden, torch.eye(2), None, torch.tensor([0]), 1.0, PLAIN)
    value.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="was computed"):
        entropy.sum().backward()


def test_logits_exist_for_response_tokens_only_and_a_chunk_at_a_time(
    tiny_untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = logprobs_module._scaled_logits

    def spy(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        sizes.append(len(hidden))
        return original(hidden, *rest)

    monkeypatch.setattr(logprobs_module, "_scaled_logits", spy)
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 4 * 104)
    model = PolicyModel(load_causal_lm(str(tiny_untied), "float32"))
    value, _ = model(pad_batch([columns([5] * 20, [7] * 6), columns([5] * 20, [7] * 3)], "cpu"), 1.0)
    value.sum().backward()
    assert sizes == [4, 4, 1] * 2


@pytest.fixture(scope="module", params=["qwen2 untied", "qwen2 tied", "llama", "gemma3"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model of each architecture, in training mode."""
    if request.param == "gemma3":
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=104,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            final_logit_softcapping=2.0,
            initializer_range=0.2,
        )
        return Gemma3ForCausalLM(config).train()
    architecture, *tied = request.param.split()
    path = tmp_path_factory.mktemp("models") / request.param.replace(" ", "-")
    make_tiny_model(path, architecture=architecture, tied=tied == ["tied"])
    return load_causal_lm(str(path), "float32").train()


SAMPLES = [columns([5, 76, 5], [84, 7, 2]), columns([2, 5, 76, 2, 9, 9, 9], [84]), columns([5, 2], [2, 2, 2, 2, 2, 0])]


def test_log_probs_are_those_of_the_models_own_logits(lm: Any) -> None:
    value, entropy = PolicyModel(lm)(pad_batch(SAMPLES, "cpu"), 0.5)
    arrays = unflatten(SAMPLES, value)
    start = 0
    for sample, array in zip(SAMPLES, arrays, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            everything = torch.log_softmax(lm(ids[None]).logits[0].float() / 0.5, dim=-1)
        for t in np.flatnonzero(sample.loss_mask):
            # Token t is predicted from position t - 1.
            assert array[t] == pytest.approx(float(everything[t - 1, ids[t]]), abs=2e-5)
            expected = -float((everything[t - 1].exp() * everything[t - 1]).sum())
            assert entropy[start].item() == pytest.approx(expected, abs=2e-5)
            start += 1
        assert np.isnan(array[~sample.loss_mask]).all()


def test_neighbours_and_padding_do_not_matter(lm: Any) -> None:
    model = PolicyModel(lm)
    together = unflatten(SAMPLES, model(pad_batch(SAMPLES, "cpu"), 1.0)[0])
    for sample, array in zip(SAMPLES, together, strict=True):
        (alone,) = unflatten([sample], model(pad_batch([sample], "cpu"), 1.0)[0])
        np.testing.assert_allclose(alone, array, atol=2e-5)


def test_eos_that_equals_the_padding_id_counts_only_where_it_was_sampled() -> None:
    # Lengths come from the records, not from token values: the prompt's 2s and the padding are not response tokens.
    batch = pad_batch([columns([2, 5], [2, 2]), columns([2, 2, 2], [7, 7, 7])], "cpu")
    assert batch.rows_N.tolist() == [0, 0, 1, 1, 1]
    assert batch.positions_N.tolist() == [2, 3, 3, 4, 5]
    assert batch.targets_N.tolist() == [2, 2, 7, 7, 7]


def test_gradients_of_masked_values_are_zero_in_the_padded_rows(lm: Any) -> None:
    model = PolicyModel(lm)
    value, _ = model(pad_batch([], "cpu"), 1.0)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(value.sum() * 0.0, parameters)
    # An empty micro-batch goes through every parameter and adds nothing to any.
    assert all(not gradient.any() for gradient in gradients)


def test_flatten_reads_response_positions_only_and_unflatten_inverts_it() -> None:
    values = [np.where(s.loss_mask, np.arange(len(s.token_ids)), np.nan).astype(np.float32) for s in SAMPLES]
    flat = flatten(SAMPLES, values, "cpu")
    assert flat.tolist() == [3, 4, 5, 7, 2, 3, 4, 5, 6, 7]
    for array, value in zip(unflatten(SAMPLES, flat), values, strict=True):
        np.testing.assert_array_equal(array, value)


def test_synthetic_batch_has_the_asked_shape() -> None:
    batch: PaddedBatch = synthetic_batch(3, 4, 2, "cpu")
    assert tuple(batch.input_ids_BL.shape) == (3, 6)
    assert batch.positions_N.tolist() == [4, 5] * 3


def test_dropout_is_switched_off_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_model(tmp_path / "model", attention_dropout=0.5)
    with caplog.at_level(logging.WARNING):
        model = PolicyModel(load_causal_lm(str(tmp_path / "model"), "float32")).train()
    batch = pad_batch(SAMPLES, "cpu")
    first, second, evaluated = model(batch, 1.0)[0], model(batch, 1.0)[0], model.eval()(batch, 1.0)[0]
    assert torch.equal(first, second) and torch.equal(first, evaluated)
    assert [r.getMessage() for r in caplog.records if "attention_dropout 0.5" in r.getMessage()] != []
    assert len([r for r in caplog.records if "dropout" in r.getMessage()]) == 1


@pytest.mark.parametrize("offset", [0.0, 30.0, -1e4])
def test_entropy_of_uniform_logits_is_ln_v_and_of_certain_ones_never_negative(offset: float) -> None:
    # Hidden size 1: the logits are the head's column times the hidden state. ln(104) = 4.6444.
    uniform = torch.full((104, 1), offset)
    _, entropy = token_logprobs(torch.ones(1, 1), uniform, None, torch.tensor([0]), 1.0, HeadShape())
    assert entropy.item() == pytest.approx(4.6444, abs=1e-3)
    peaked = uniform.clone()
    peaked[0] += 50
    _, entropy = token_logprobs(torch.ones(1, 1), peaked, None, torch.tensor([0]), 1.0, HeadShape())
    assert 0.0 <= entropy.item() < 1e-3
