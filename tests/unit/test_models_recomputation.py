"""Activation checkpointing: the same gradients, from layers that are computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.models.batch import pad_batch
from rlhf.models.load import load_causal_lm
from rlhf.models.packed import pack_batch
from rlhf.models.policy import PolicyModel
from rlhf.models.recomputation import recompute_activations
from tests.tiny import Architecture, make_tiny_model
from tests.unit.test_models_packed import random_samples


@pytest.fixture(scope="module", params=["qwen2", "llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    return make_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture)


def layer_passes(model: Any, arrangement: str) -> list[int]:
    """Forward passes begun of each layer's MLP in one pass forward and backward, which leaves its gradients."""
    counts = [0] * len(model.lm.model.layers)

    def count(index: int) -> Any:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    for index, layer in enumerate(model.lm.model.layers):
        layer.mlp.register_forward_pre_hook(count(index))
    columns, groups = random_samples()
    batch = pack_batch(columns, groups, "cpu") if arrangement == "packed" else pad_batch(columns, "cpu")
    logprobs, entropy = model(batch, 0.7)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return counts


@pytest.mark.parametrize("arrangement", ["packed", "padded"])
def test_gradients_are_those_without_it_and_every_layer_is_computed_twice(folder: Path, arrangement: str) -> None:
    plain, recomputed = (PolicyModel(load_causal_lm(str(folder), "float32")) for _ in range(2))
    recompute_activations(recomputed.lm)
    assert layer_passes(plain, arrangement) == [1, 1]
    assert layer_passes(recomputed, arrangement) == [2, 2]
    expected = dict(plain.named_parameters())
    for name, parameter in recomputed.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name  # type: ignore[arg-type]


def test_pass_without_gradients_computes_every_layer_once(folder: Path) -> None:
    lm = load_causal_lm(str(folder), "float32")
    recompute_activations(lm)
    calls = list[int]()
    lm.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        lm(torch.tensor([[5, 76, 5]]))
    assert len(calls) == 1


def test_nothing_but_layers_and_what_holds_them_is_in_training_mode(folder: Path) -> None:
    lm = load_causal_lm(str(folder), "float32")
    recompute_activations(lm)
    kinds = {type(module) for module in lm.modules() if module.training}
    assert kinds == {type(lm.model), type(lm.model.layers[0])}


def test_model_whose_layers_can_not_be_computed_again_is_refused(folder: Path) -> None:
    lm = load_causal_lm(str(folder), "float32")
    lm.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="does not support gradient checkpointing"):
        recompute_activations(lm)
