"""Packed rows against each sample alone, as transformers computes it with its eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.models import attention
from rlhf.models.attention import PACKED_ATTENTION, Block, PackedLayout, packed_attention
from rlhf.models.backbone import ScalarHead
from rlhf.models.batch import flatten, pad_batch, unflatten
from rlhf.models.logprobs import HeadShape
from rlhf.models.packed import PackedBatch, can_pack, pack_batch, packed_hidden_states, synthetic_packed_batch
from rlhf.models.policy import LogProbHead
from rlhf.trajectories import Columns, SamplingMask

attention.register()
VOCABULARY = 104
ARCHITECTURES = ("qwen2", "qwen2-window", "llama", "gemma3")
WINDOW = 6


def config_of(architecture: str) -> Any:
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
        "num_labels": 1,
    }
    if architecture == "llama":
        return LlamaConfig(**shape)
    if architecture == "qwen2":
        return Qwen2Config(**shape)
    if architecture == "qwen2-window":
        return Qwen2Config(**shape, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    # Layers with a window and without one have different rope bases.
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**shape, head_dim=16, query_pre_attn_scalar=32, sliding_window=WINDOW, layer_types=kinds)
    assert {rope["rope_theta"] for rope in config.rope_parameters.values()} == {1e4, 1e6}
    return config


def make(architecture: str, kind: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, the same for every attention implementation."""
    import transformers

    auto: Any = {
        "lm": transformers.AutoModelForCausalLM,
        "classifier": transformers.AutoModelForSequenceClassification,
    }[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config_of(architecture), attn_implementation=implementation, dtype=dtype)
    if kind == "classifier":
        model.score = ScalarHead(model.score.weight)
    return model


def sample(prompt: Sequence[int], response: Sequence[int]) -> Columns:
    return Columns.from_completion(prompt, response, [-1.0] * len(response), 0)


def random_samples() -> tuple[list[Columns], list[int]]:
    """Three groups: one that shares its prompt, one of a single sample, one whose window ends within its responses."""
    rng = np.random.default_rng(1)
    columns, groups = [], []
    for group, (prompt, responses) in enumerate([(9, (4, 13, 1, 4)), (5, (7,)), (3, (17, 8))]):
        ids = rng.integers(VOCABULARY, size=prompt).tolist()
        for response in responses:
            columns.append(sample(ids, rng.integers(VOCABULARY, size=response).tolist()))
            groups.append(group)
    return columns, groups


def with_turns(prompt: list[int], first: list[int], between: list[int], second: list[int]) -> Columns:
    """A sample of two turns, between which tokens were not sampled."""
    ids = np.array([*prompt, *first, *between, *second], np.int32)
    sizes = [len(prompt), len(first), len(between), len(second)]
    mask = np.repeat([False, True, False, True], sizes)
    return Columns(ids, mask, np.where(mask, -1.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32))


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[attention.QUERY_CHUNK, 3], ids=["whole", "chunked"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_CHUNK", request.param)


def head_of(lm: Any) -> LogProbHead:
    return LogProbHead(lm.get_output_embeddings(), HeadShape.of(lm.config))


def packed_logprobs(lm: Any, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    hidden = packed_hidden_states(lm, batch)[batch.predict_N]
    outputs: tuple[Tensor, Tensor] = head_of(lm)(hidden, batch.targets_N, temperature, batch.mask)
    return outputs


def states_alone(lm: Any, columns: Columns) -> Tensor:
    ids = torch.from_numpy(columns.token_ids.astype(np.int64))[None]
    states: Tensor = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return states


def logits_alone(lm: Any, columns: Columns) -> Tensor:
    """transformers' own logits, of the positions that predict response tokens."""
    ids = torch.from_numpy(columns.token_ids.astype(np.int64))[None]
    logits: Tensor = lm(input_ids=ids, use_cache=False).logits[0, np.flatnonzero(columns.loss_mask) - 1]
    return logits.float()


def logprobs_alone(lm: Any, columns: Columns, temperature: float = 1.0) -> Tensor:
    logits = logits_alone(lm, columns) / temperature
    targets = torch.from_numpy(columns.token_ids[columns.loss_mask].astype(np.int64))
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def assert_same_gradients(model: Any, other: Any) -> None:
    expected = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - expected[name].grad).norm()
        assert difference <= 1e-5 * expected[name].grad.norm(), f"{name}: {difference / expected[name].grad.norm()}"


def weights_of(count: int) -> Tensor:
    """A different weight for every response token, so that gradients of one can't stand for those of another."""
    return torch.from_numpy(np.random.default_rng(2).normal(size=count).astype(np.float32))


@pytest.mark.usefixtures("chunk")
class TestEqualToTheSampleAlone:
    def test_logprobs_and_gradients_of_every_sample(self, architecture: str) -> None:
        columns, groups = random_samples()
        model, reference = make(architecture, "lm", PACKED_ATTENTION), make(architecture, "lm", "eager")
        batch = pack_batch(columns, groups, "cpu")
        found, _ = packed_logprobs(model, batch)
        expected = torch.cat([logprobs_alone(reference, c) for c in columns])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        weights = weights_of(len(expected))
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        assert_same_gradients(model, reference)

    def test_values_and_their_gradients(self, architecture: str) -> None:
        columns, groups = random_samples()
        model = make(architecture, "classifier", PACKED_ATTENTION)
        reference = make(architecture, "classifier", "eager")
        batch = pack_batch(columns, groups, "cpu")
        found = model.score(packed_hidden_states(model, batch)[batch.predict_N])
        expected = torch.cat(
            [reference.score(states_alone(reference, c)[np.flatnonzero(c.loss_mask) - 1]) for c in columns]
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        weights = weights_of(len(expected))
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        assert_same_gradients(model, reference)

    def test_rewards(self, architecture: str) -> None:
        columns, groups = random_samples()
        model = make(architecture, "classifier", PACKED_ATTENTION)
        reference = make(architecture, "classifier", "eager")
        batch = pack_batch(columns, groups, "cpu")
        with torch.no_grad():
            found = model.score(packed_hidden_states(model, batch)[batch.last_B])
            expected = torch.stack([reference.score(states_alone(reference, c)[-1]) for c in columns])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert float(found.std()) > 0.1

    def test_samples_of_several_turns_share_their_first_prompt(self, architecture: str) -> None:
        columns = [
            with_turns([5, 6, 7, 8, 9], [10, 11, 12], [13, 14], [15, 16]),
            with_turns([5, 6, 7, 8, 9], [20], [21, 22, 23], [24, 25, 26, 27]),
        ]
        model, reference = make(architecture, "lm", PACKED_ATTENTION), make(architecture, "lm", "eager")
        batch = pack_batch(columns, [0, 0], "cpu")
        # 5 of the prompt, then 3 + 2 + 2 and 1 + 3 + 4 tokens.
        assert batch.unique_tokens == 5 + 7 + 8
        with torch.no_grad():
            found, _ = packed_logprobs(model, batch)
            expected = torch.cat([logprobs_alone(reference, c) for c in columns])
        assert len(found) == 5 + 5
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_bfloat16_is_off_by_rounding_alone(self, architecture: str) -> None:
        columns, groups = random_samples()
        model = make(architecture, "lm", PACKED_ATTENTION, torch.bfloat16)
        reference = make(architecture, "lm", "eager", torch.bfloat16)
        exact = reference_in_float32(architecture, reference)
        with torch.no_grad():
            found, _ = packed_logprobs(model, pack_batch(columns, groups, "cpu"))
            alone = torch.cat([logprobs_alone(reference, c) for c in columns])
            expected = torch.cat([logprobs_alone(exact, c) for c in columns])
        # As far from the same weights in float32 as the sample alone in bfloat16 is.
        assert (found - expected).abs().mean() <= 1.5 * (alone - expected).abs().mean()


def reference_in_float32(architecture: str, narrow: Any) -> Any:
    model = make(architecture, "lm", "eager")
    model.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    return model


def with_mask(c: Columns) -> Columns:
    """The sample, where of the whole vocabulary three tokens could be sampled at each place: its own and two more."""
    targets = c.token_ids[c.loss_mask]
    allowed = np.stack([targets, (targets + 1) % VOCABULARY, (targets + 7) % VOCABULARY], 1)
    mask = SamplingMask(np.arange(0, allowed.size + 1, 3), allowed.ravel().astype(np.int32), allowed=True)
    return Columns(c.token_ids, c.loss_mask, c.logprobs, c.weight_versions, mask)


def test_temperature_and_sampling_masks_act_as_on_padded_rows() -> None:
    columns, groups = random_samples()
    masked = [with_mask(c) for c in columns]
    model, reference = make("qwen2", "lm", PACKED_ATTENTION), make("qwen2", "lm", "eager")
    found, _ = packed_logprobs(model, pack_batch(masked, groups, "cpu"), 0.7)
    expected = []
    for c in columns:
        targets = torch.from_numpy(c.token_ids[c.loss_mask].astype(np.int64))
        three = torch.stack([targets, (targets + 1) % VOCABULARY, (targets + 7) % VOCABULARY], 1)
        expected.append((logits_alone(reference, c) / 0.7).gather(1, three).log_softmax(-1)[:, 0])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    weights = weights_of(len(found))
    (found * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    assert_same_gradients(model, reference)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of every attention kernel call from now on."""
    calls = []
    sdpa = attention._sdpa

    def recorded(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return sdpa(query, key, *rest)

    monkeypatch.setattr(attention, "_sdpa", recorded)
    return calls


class TestIsolation:
    def test_tokens_of_one_sample_change_nothing_in_another(self, architecture: str) -> None:
        columns, groups = random_samples()
        model = make(architecture, "lm", PACKED_ATTENTION)
        before, after = list(columns), list(columns)
        # The second of four samples that share a prompt.
        after[1] = sample(columns[1].token_ids[:9].tolist(), [(t + 1) % VOCABULARY for t in columns[1].token_ids[9:]])
        with torch.no_grad():
            old, new = (
                unflatten(samples, packed_logprobs(model, pack_batch(samples, groups, "cpu"))[0])
                for samples in (before, after)
            )
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            assert np.array_equal(one, other, equal_nan=True) == (index != 1)

    def test_nan_in_one_sample_stays_in_it(self, architecture: str) -> None:
        poison = 103
        columns = [sample([9, 8, 7], [5, 6]), sample([9, 8, 7], [5, poison, 6]), sample([9, 8, 7], [6, 5, 6])]
        model = make(architecture, "lm", PACKED_ATTENTION)
        with torch.no_grad():
            model.get_input_embeddings().weight[poison] = torch.nan
            hidden = packed_hidden_states(model, pack_batch([*columns, sample([4], [5])], [0, 0, 0, 1], "cpu"))
        finite = hidden.isfinite().all(-1).tolist()
        # The prompt of 3 and the first response of 2; 3 with the poison; the third response and the other group.
        assert finite[:5] == [True] * 5
        assert finite[6:8] == [False] * 2
        assert finite[8:] == [True] * (3 + 2)

    def test_attention_computes_no_pair_of_different_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = record_calls(monkeypatch)
        query = torch.zeros(1, 2, 4 * 13, 8)
        PackedLayout([Block(5, (6, 2))] * 4).attend(query, query, query, None, None)
        # 5 queries and keys in the prompt, 6 and 11, 2 and 7 in the samples, for each of four groups.
        assert calls == [(5, 5), (6, 11), (2, 7)] * 4

    def test_pairs_beyond_a_window_are_not_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = record_calls(monkeypatch)
        monkeypatch.setattr(attention, "QUERY_CHUNK", 4)
        query = torch.zeros(1, 1, 10, 8)
        PackedLayout([Block(10)]).attend(query, query, query, None, 3)
        # Queries 0-3 see keys 0-3, 4-7 see 2-7, 8-9 see 6-9.
        assert calls == [(4, 4), (4, 6), (2, 4)]

    def test_masks_are_made_once_for_all_layers(self) -> None:
        model = make("llama", "lm", PACKED_ATTENTION)
        columns, groups = random_samples()
        batch = pack_batch(columns, groups, "cpu")
        with torch.no_grad():
            packed_hidden_states(model, batch)
            masks = dict(batch.layout._masks)
            packed_hidden_states(model, batch)
        # Responses of 4, 13, 1, 4 after 9 tokens and of 17, 8 after 3: five shapes.
        assert len(masks) == 5
        assert all(batch.layout._masks[key] is mask for key, mask in masks.items())


class TestPackBatch:
    def test_layout_of_a_group_by_hand(self) -> None:
        columns = [sample([5, 6, 7], [8, 9]), sample([5, 6, 7], [10]), sample([11, 12], [13, 14])]
        batch = pack_batch(columns, [0, 0, 1], "cpu")
        assert batch.layout.blocks == (Block(3, (2, 1)), Block(4))
        assert batch.input_ids_1L.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
        assert batch.position_ids_1L.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
        # The last prompt token, at 2, predicts the first token of both responses.
        assert batch.predict_N.tolist() == [2, 3, 2, 7, 8]
        assert batch.targets_N.tolist() == [8, 9, 10, 13, 14]
        assert batch.rows_N.tolist() == [0, 0, 1, 2, 2]
        assert batch.positions_N.tolist() == [3, 4, 3, 2, 3]
        assert batch.last_B.tolist() == [4, 5, 9]
        assert batch.lengths_B.tolist() == [5, 4, 4]
        assert (batch.unique_tokens, batch.total_tokens) == (10, 13)

    def test_flat_arrays_are_in_the_order_of_padded_rows(self) -> None:
        columns, groups = random_samples()
        batch, padded = pack_batch(columns, groups, "cpu"), pad_batch(columns, "cpu")
        for name in ("targets_N", "rows_N", "positions_N", "lengths_B"):
            assert torch.equal(getattr(batch, name), getattr(padded, name))
        ids = [c.token_ids.astype(np.float32) for c in columns]
        assert flatten(columns, ids, "cpu").tolist() == batch.targets_N.tolist()

    @pytest.mark.parametrize(
        ("columns", "groups"),
        [
            ([sample([5, 6], [7]), sample([5, 9], [7])], [0, 0]),
            ([sample([5, 6], [7]), sample([5, 6], [7])], [0, 1]),
            ([sample([5, 6], [7]), sample([5, 6, 7], [8])], [0, 0]),
        ],
        ids=["other prompt", "other group", "longer prompt"],
    )
    def test_samples_without_a_prompt_in_common_have_one_each(self, columns: list[Columns], groups: list[int]) -> None:
        batch = pack_batch(columns, groups, "cpu")
        assert batch.layout.blocks == tuple(Block(len(c.token_ids)) for c in columns)
        assert batch.unique_tokens == batch.total_tokens

    def test_group_that_another_interrupts_has_its_prompt_twice(self) -> None:
        columns = [sample([5, 6], [7]), sample([8], [9]), sample([5, 6], [7])]
        assert pack_batch(columns, [0, 1, 0], "cpu").layout.blocks == (Block(3), Block(2), Block(3))

    def test_sample_without_a_response_is_scored_at_the_end_of_its_prompt(self) -> None:
        batch = pack_batch([sample([5, 6], []), sample([5, 6], [7])], [0, 0], "cpu")
        assert batch.last_B.tolist() == [1, 2]
        assert batch.predict_N.tolist() == [1]

    def test_no_samples_give_one_response_token(self) -> None:
        empty, padded = pack_batch([], [], "cpu"), pad_batch([], "cpu")
        assert empty.input_ids_1L.tolist() == padded.input_ids_BL.tolist() == [[0, 0]]
        assert empty.predict_N.tolist() == [0]
        assert empty.targets_N.tolist() == padded.targets_N.tolist()
        logprobs, _ = packed_logprobs(make("llama", "lm", PACKED_ATTENTION), empty)
        assert logprobs.shape == (1,) and logprobs.isfinite().all()

    def test_synthetic_batch_has_the_shape_that_was_asked_for(self) -> None:
        batch = synthetic_packed_batch(2, 3, 5, 4, "cpu")
        assert batch.layout.blocks == (Block(5, (4, 4, 4)),) * 2
        assert len(batch.targets_N) == 2 * 3 * 4

    def test_sample_that_starts_with_a_sampled_token_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="sample b: its first token is marked as sampled"):
            pack_batch([sample([5], [6]), sample([], [6])], [0, 1], "cpu", ["a", "b"])

    def test_sampling_mask_that_does_not_fit_is_refused_by_name(self) -> None:
        mask = SamplingMask(np.array([0, 1]), np.array([7], np.int32), allowed=True)
        wrong = Columns.from_completion([5], [6], [-1.0], 0, mask)
        with pytest.raises(ValueError, match="sample a"):
            pack_batch([wrong], [0], "cpu", ["a"])


class TestAttentionFunction:
    @pytest.mark.parametrize("attention_mask", [None, [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]])
    def test_rows_without_a_layout_are_those_of_sdpa(self, architecture: str, attention_mask: object) -> None:
        ids = torch.tensor([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13]]).repeat(1, 3)
        mask = None if attention_mask is None else torch.tensor(attention_mask).repeat(1, 3)
        with torch.no_grad():
            found, expected = (
                make(architecture, "lm", name)(input_ids=ids, attention_mask=mask, use_cache=False).logits
                for name in (PACKED_ATTENTION, "sdpa")
            )
        assert torch.equal(found, expected)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize("window", [None, 4])
    def test_flex_attention_sees_the_same_tokens(self, window: int | None) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        blocks = [Block(5, (6, 2, 6)), Block(7), Block(3, (4, 0))]
        tokens = sum(block.tokens for block in blocks)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
        layout = PackedLayout(blocks)
        found = layout._attend_flex(flex_attention, query, key, value, 0.3, window)
        torch.testing.assert_close(found, layout.attend(query, key, value, 0.3, window), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"softcap": 50.0}, "softcap"),
            ({"s_aux": torch.zeros(2)}, "s_aux"),
            ({"dropout": 0.1}, "dropout"),
            ({"is_causal": False}, "attention in both directions"),
        ],
    )
    def test_what_packed_rows_do_not_have_is_refused(self, settings: dict[str, Any], named: str) -> None:
        states = torch.zeros(1, 2, 3, 8)
        with pytest.raises(ValueError, match=f"Identity uses {named}, which packed rows don't have"):
            packed_attention(torch.nn.Identity(), *[states] * 3, None, packed=PackedLayout([Block(3)]), **settings)


class TestCanPack:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_models_that_compute_the_same_on_packed_rows(self, architecture: str, dtype: torch.dtype) -> None:
        assert can_pack(make(architecture, "lm", PACKED_ATTENTION, dtype)) is None
        assert can_pack(make(architecture, "classifier", PACKED_ATTENTION, dtype)) is None

    def test_other_attention_implementation(self) -> None:
        reason = can_pack(make("llama", "lm", "sdpa"))
        assert reason == "LlamaForCausalLM was loaded with sdpa attention, packed rows need rlhf_packed"

    def test_attention_with_capped_logits(self) -> None:
        from transformers import AutoModelForCausalLM, Gemma2Config

        config = Gemma2Config(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        reason = can_pack(AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION))
        assert reason is not None and "Gemma2Attention uses softcap" in reason

    def test_layers_that_carry_a_state_along_the_row(self) -> None:
        model = make("llama", "lm", PACKED_ATTENTION)
        model.config.layer_types = ["linear_attention", "full_attention"]
        assert can_pack(model) == "LlamaForCausalLM has layers of type linear_attention, which packed rows don't have"

    def test_windows_that_do_not_reach_attention(self) -> None:
        model = make("gemma3", "lm", PACKED_ATTENTION)
        model.model.layers[0].self_attn.sliding_window = None
        reason = can_pack(model)
        assert reason is not None and "ask for sliding windows [None, None], its configuration says [6, None]" in reason

    def test_positions_that_are_not_those_given(self) -> None:
        model = make("llama", "lm", PACKED_ATTENTION)
        rotary = model.model.rotary_emb

        def by_place(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles: tuple[Tensor, Tensor] = rotary.original(hidden, torch.arange(position_ids.shape[1])[None])
            return angles

        rotary.original, rotary.forward = rotary.forward, by_place
        reason = can_pack(model)
        assert reason is not None and "between packed and padded rows (0.0001 allowed)" in reason

    def test_not_a_number(self) -> None:
        model = make("llama", "lm", PACKED_ATTENTION)
        with torch.no_grad():
            model.model.norm.weight[0] = torch.nan
        reason = can_pack(model)
        assert reason is not None and "differ by nan" in reason

    def test_model_that_takes_no_layout(self) -> None:
        from transformers import AutoModelForCausalLM, BloomConfig

        config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
        reason = can_pack(AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION))
        assert reason is not None and reason.startswith("BloomForCausalLM fails on a packed row: ")

    def test_weights_and_random_state_stay_as_they_are(self) -> None:
        model = make("llama", "lm", PACKED_ATTENTION)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        states = torch.get_rng_state(), np.random.get_state()[1].copy()
        assert can_pack(model) is None
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1])
