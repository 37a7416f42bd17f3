"""Adapters beside frozen weights: what they compute, what is merged for engines, and what never changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.schema import LoraConfig
from rlhf.models.load import load_causal_lm
from rlhf.models.lora import Adapters, add_adapters, checkpoint_parameters
from rlhf.models.packed import can_pack, pack_batch
from rlhf.models.policy import PolicyModel
from rlhf.trajectories import Columns
from rlhf.weights.source import LearnerSource

SETTINGS = LoraConfig(rank=4, alpha=8)
SYNCS = 1000
# Less than the larger matrices, more than the smaller ones: pieces of one tensor and of several.
BUCKET_BYTES = 1 << 16


def load(path: Path, settings: LoraConfig | None = SETTINGS, seed: int = 1, dtype: str = "float32") -> Any:
    lm = load_causal_lm(str(path), dtype)
    if settings is not None:
        add_adapters(lm, settings, seed)
    return lm


def adapters_of(lm: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}


def move(lm: nn.Module, seed: int = 0) -> None:
    """Give every adapter values as after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters_of(lm).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def logprobs(lm: Any) -> Tensor:
    """Log-probs of three samples on a packed row, two of which share their prompt."""
    samples = [
        Columns.from_completion(prompt, response, [0.0] * len(response), 0)
        for prompt, response in (([5, 76, 5, 84], [6, 7]), ([5, 76, 5, 84], [8]), ([9, 84], [10, 11, 2]))
    ]
    return PolicyModel(lm)(pack_batch(samples, [0, 0, 1], "cpu"), 1.0)[0]  # type: ignore[no-any-return]


class Holder:
    """A model as the weight sync sees a learner that is whole on one rank."""

    def __init__(self, lm: nn.Module) -> None:
        self.named = checkpoint_parameters(lm, tied=True)
        self.adapters = Adapters(lm)

    def named_parameters_for_sync(self) -> list[tuple[str, nn.Parameter]]:
        return self.named

    def gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return self.adapters.merged(parameter)


def sent(lm: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in LearnerSource(Holder(lm), dtype, BUCKET_BYTES)}


@pytest.fixture(params=["untied", "tied"])
def path(request: pytest.FixtureRequest, tiny_untied: Path, tiny_tied: Path) -> Path:
    return tiny_tied if request.param == "tied" else tiny_untied


class TestFreshAdapters:
    def test_they_change_no_log_prob(self, path: Path) -> None:
        assert torch.equal(logprobs(load(path)), logprobs(load(path, None)))

    def test_they_follow_from_the_seed_and_from_nothing_else(self, path: Path) -> None:
        torch.manual_seed(7)
        first = adapters_of(load(path, seed=1))
        torch.manual_seed(8)
        second, other = adapters_of(load(path, seed=1)), adapters_of(load(path, seed=2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)

    def test_making_them_leaves_the_random_stream_where_it_was(self, path: Path) -> None:
        lm = load(path, None)
        torch.manual_seed(7)
        add_adapters(lm, SETTINGS, 1)
        after = torch.rand(1)
        torch.manual_seed(7)
        assert torch.equal(after, torch.rand(1))

    def test_each_layer_below_the_head_has_one_of_its_rank(self, path: Path) -> None:
        # Seven projections in each of two layers, an A and a B for each.
        found = adapters_of(load(path))
        assert len(found) == 2 * 7 * 2
        assert {min(parameter.shape) for parameter in found.values()} == {4}

    def test_named_targets_have_adapters_and_no_others(self, path: Path) -> None:
        found = adapters_of(load(path, LoraConfig(rank=2, target_modules=["q_proj", "down_proj"])))
        assert len(found) == 2 * 2 * 2
        assert all(".q_proj." in name or ".down_proj." in name for name in found)

    @pytest.mark.parametrize(
        ("target", "message"),
        [("lm_head", "output head"), ("embed_tokens", "Embedding"), ("query", "not found")],
    )
    def test_what_is_no_layer_is_refused(self, path: Path, target: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load(path, LoraConfig(rank=2, target_modules=[target]))


class TestTraining:
    def test_the_gradient_reaches_the_adapters_only(self, path: Path) -> None:
        lm = load(path)
        move(lm)
        logprobs(lm).sum().backward()
        reached = {name for name, parameter in lm.named_parameters() if parameter.grad is not None}
        assert reached == {name for name in dict(lm.named_parameters()) if ".lora_" in name}
        assert all(bool(parameter.grad.any()) for parameter in adapters_of(lm).values())  # type: ignore[union-attr]

    def test_packed_rows_are_computed_as_padded_ones(self, path: Path) -> None:
        lm = load(path)
        move(lm)
        assert can_pack(lm) is None


class TestReference:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_with_adapters_off_the_model_is_the_base_model_bit_for_bit(self, path: Path, dtype: str) -> None:
        base = logprobs(load(path, None, dtype=dtype))
        lm = load(path, dtype=dtype)
        move(lm)
        on = logprobs(lm)
        with Adapters(lm).off():
            assert torch.equal(logprobs(lm), base)
        assert torch.equal(logprobs(lm), on)
        assert (on - base).abs().max() > 0.1

    def test_turning_them_off_leaves_what_is_trained(self, path: Path) -> None:
        lm = load(path)
        before = adapters_of(lm).keys()
        with pytest.raises(RuntimeError, match="scoring failed"), Adapters(lm).off():
            assert adapters_of(lm).keys() == before
            raise RuntimeError("scoring failed")
        move(lm)
        assert (logprobs(lm) - logprobs(load(path, None))).abs().max() > 0.1


class TestCheckpoint:
    def test_adapters_are_loaded_and_what_is_not_quite_them_is_refused(self, tiny_tied: Path) -> None:
        from rlhf.learners.checkpoint import LearnerCheckpoint

        trained, fresh = load(tiny_tied), load(tiny_tied)
        move(trained)
        zero: Any = SimpleNamespace(model=fresh, stage=2, deepspeed=SimpleNamespace())
        checkpoint = LearnerCheckpoint("policy", "float32", zero, ranks=None)  # type: ignore[arg-type]
        saved = dict(adapters_of(trained))
        checkpoint._load_trained(saved, fresh)
        assert torch.equal(logprobs(fresh), logprobs(trained))
        name = next(iter(saved))
        for wrong in ({**saved, "model.norm.weight": torch.ones(128)}, {n: w for n, w in saved.items() if n != name}):
            with pytest.raises(ValueError, match="doesn't have the weights that are trained here, or others"):
                checkpoint._load_trained(wrong, fresh)


class TestSync:
    def test_names_shapes_and_dtypes_are_those_of_the_model_without_adapters(self, path: Path) -> None:
        with_adapters, without = (
            LearnerSource(Holder(load(path, settings)), torch.bfloat16, BUCKET_BYTES).metadata()
            for settings in (SETTINGS, None)
        )
        assert with_adapters == without

    def test_what_is_sent_is_what_peft_merges_into_a_copy(self, path: Path) -> None:
        lm = load(path)
        move(lm)
        by_peft = copy.deepcopy(lm)
        for module in by_peft.modules():
            if hasattr(module, "lora_A"):
                module.merge()
        expected = dict(checkpoint_parameters(by_peft, tied=True))
        found = sent(lm)
        assert found.keys() == expected.keys()
        # Values are up to 1: one product and one sum more or less are a few units of 1e-7.
        assert max(float((found[name] - expected[name]).detach().abs().max()) for name in found) < 1e-6

    def test_by_hand(self, path: Path) -> None:
        # A is all 1, B is all 2, four ranks, alpha / rank is 8 / 4: every weight grows by 2 x (4 x 2) = 16.
        lm = load(path)
        with torch.no_grad():
            for name, parameter in adapters_of(lm).items():
                parameter.fill_(1.0 if "lora_A" in name else 2.0)
        base, found = sent(load(path, None)), sent(lm)
        name = "model.layers.1.mlp.down_proj.weight"
        torch.testing.assert_close(found[name], base[name] + 16)
        assert torch.equal(found["model.norm.weight"], base["model.norm.weight"])

    def test_a_model_with_the_sent_weights_has_the_log_probs_of_the_one_with_adapters(self, path: Path) -> None:
        lm = load(path)
        move(lm)
        served = load(path, None)
        served.load_state_dict(sent(lm))
        torch.testing.assert_close(logprobs(served), logprobs(lm), atol=2e-5, rtol=0)

    def test_bfloat16_weights_are_rounded_once_after_the_sum(self, path: Path) -> None:
        lm = load(path, dtype="bfloat16")
        move(lm)
        parameters, found = dict(checkpoint_parameters(lm)), sent(lm, torch.bfloat16)
        layer = lm.get_submodule("model.layers.0.self_attn.q_proj")
        up, down = (m.default.weight.float() for m in (layer.lora_B, layer.lora_A))
        exact = parameters["model.layers.0.self_attn.q_proj.weight"].float() + 2 * up @ down
        # Half a unit in the last of 8 bits.
        error = (found["model.layers.0.self_attn.q_proj.weight"].float() - exact).abs()
        assert bool((error <= exact.abs() * 2**-8 + 1e-6).all())

    def test_base_weights_are_bit_equal_after_a_thousand_syncs(self, tiny_tied: Path) -> None:
        lm = load(tiny_tied)
        before = {name: parameter.clone() for name, parameter in lm.named_parameters() if not parameter.requires_grad}
        source = LearnerSource(Holder(lm), torch.float32, BUCKET_BYTES)
        for step in range(SYNCS):
            with torch.no_grad():
                for parameter in adapters_of(lm).values():
                    parameter.add_(1e-3 if step % 3 else -1e-3)
            for _, tensor in source:
                assert tensor.shape
        after = dict(lm.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before)
