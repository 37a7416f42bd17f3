"""Ranks that share a packed row, against one rank that has it for itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.batching import CostModel
from rlhf.models import arrangement, attention, sequence
from rlhf.models.arrangement import Arrangement
from rlhf.models.attention import PACKED_ATTENTION, Block
from rlhf.models.packed import PackedBatch, cut, pack_batch, synthetic_packed_batch
from rlhf.models.policy import PolicyModel
from rlhf.models.sequence import SequenceGroup, join_sequence_group
from rlhf.models.value import ValueModel
from rlhf.trajectories import Columns, SamplingMask
from tests.unit.gloo_ranks import on_ranks
from tests.unit.test_models_packed import ARCHITECTURES, make, random_samples, sample, weights_of, with_mask

Gradients = dict[str, Tensor]


def apart(rank: int, size: int) -> SequenceGroup:
    """A rank that never meets the others."""
    return SequenceGroup(None, rank, size)  # type: ignore[arg-type]


class TestGroups:
    def test_consecutive_ranks_share_rows_and_wait_for_each_other_no_longer_than_the_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(dist, "new_subgroups", lambda **settings: asked.append(settings) or (object(), []))
        groups = [join_sequence_group(rank, 4, 2, 7.0) for rank in range(4)]
        assert [(group.rank, group.size) for group in groups if group is not None] == [(0, 2), (1, 2), (0, 2), (1, 2)]
        assert asked == [{"group_size": 2, "timeout": timedelta(seconds=7)}] * 4

    def test_ranks_with_rows_of_their_own_have_no_group(self) -> None:
        assert join_sequence_group(0, 4, 1, 7.0) is None


class TestExchange:
    def test_pieces_with_all_heads_become_whole_rows_with_some(self) -> None:
        # Three ranks, three heads, two tokens a rank: head h has 10 h + t at token t of six.
        def work(group: SequenceGroup) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(6)[2 * group.rank : 2 * group.rank + 2]
            piece = (10 * torch.arange(3)[:, None] + tokens)[None, :, :, None]
            (whole,) = group.to_heads(piece)
            # Attention puts tokens before heads.
            back = group.to_tokens(whole.transpose(1, 2))
            return whole, back.transpose(1, 2) - piece

        for rank, (whole, difference) in enumerate(on_ranks(3, work)):
            assert whole[..., 0].tolist() == [[[10 * rank + token for token in range(6)]]]
            assert difference.shape == (1, 3, 2, 1) and not difference.any()

    def test_gradients_go_back_the_way_that_values_came(self) -> None:
        # The same numbers as weights: each value's gradient is its own weight, wherever it was used.
        def work(group: SequenceGroup) -> tuple[Tensor, Tensor]:
            piece = torch.zeros(1, 2, 2, 1, requires_grad=True)
            (whole,) = group.to_heads(piece)
            tokens = torch.arange(4)
            (gradient,) = torch.autograd.grad((whole * (10.0 * group.rank + tokens)[:, None]).sum(), piece)
            part = torch.zeros(1, 4, 1, 1, requires_grad=True)
            weights = 10 * torch.arange(2) + (2 * group.rank + torch.arange(2))[:, None]
            (back,) = torch.autograd.grad((group.to_tokens(part)[..., 0] * weights).sum(), part)
            return gradient, back

        for rank, (gradient, back) in enumerate(on_ranks(2, work)):
            assert gradient[0, :, :, 0].tolist() == [[2 * rank, 2 * rank + 1], [10 + 2 * rank, 11 + 2 * rank]]
            assert back[0, :, 0, 0].tolist() == [10 * rank + token for token in range(4)]

    def test_queries_keys_and_values_travel_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        exchange = sequence._all_to_all
        monkeypatch.setattr(sequence, "_all_to_all", lambda *args: calls.append(1) or exchange(*args))

        def work(group: SequenceGroup) -> list[Tensor]:
            states = [torch.full((1, heads, 3, size), heads + group.rank) for heads, size in ((4, 8), (2, 8), (2, 5))]
            return group.to_heads(*states)

        for states in on_ranks(2, work):
            assert [tuple(state.shape) for state in states] == [(1, 2, 6, 8), (1, 1, 6, 8), (1, 1, 6, 5)]
            # Rank 0's tokens first.
            assert [state[0, 0, :, 0].tolist() for state in states] == [[h] * 3 + [h + 1] * 3 for h in (4, 2, 2)]
        assert len(calls) == 2

    def test_every_rank_has_all_outputs_and_the_gradients_of_its_own(self) -> None:
        def work(group: SequenceGroup) -> tuple[Tensor, Tensor]:
            own = [torch.tensor([3, 0]), torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)][group.rank]
            values = (10.0 + own).requires_grad_()
            whole = group.assemble(values, own, 4)
            (gradient,) = torch.autograd.grad((whole * torch.tensor([2.0, 3.0, 5.0, 7.0])).sum(), values)
            return whole, gradient

        found = on_ranks(3, work)
        assert [whole.tolist() for whole, _ in found] == [[10, 11, 12, 13]] * 3
        assert [gradient.tolist() for _, gradient in found] == [[7, 2], [3, 5], []]


class TestCut:
    def test_pieces_of_a_row_by_hand(self) -> None:
        columns = [sample([5, 6, 7], [8, 9]), sample([5, 6, 7], [10]), sample([11, 12], [13, 14])]
        row = pack_batch(columns, [0, 0, 1], "cpu")
        # Ten tokens on four ranks: three each, and two that belong to nobody.
        pieces = [cut(row, apart(rank, 4)) for rank in range(4)]
        assert [piece.input_ids_1L.tolist()[0] for piece in pieces] == [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 0, 0]]
        assert [piece.position_ids_1L.tolist()[0] for piece in pieces] == [[0, 1, 2], [3, 4, 3], [0, 1, 2], [3, 0, 1]]
        assert all(piece.layout.blocks == (Block(3, (2, 1)), Block(4), Block(2)) for piece in pieces)
        # Predicted at 2, 3, 2, 7 and 8 of the row.
        assert [piece.predict_N.tolist() for piece in pieces] == [[2, 2], [0], [1, 2], []]
        assert [piece.targets_N.tolist() for piece in pieces] == [[8, 10], [9], [13, 14], []]
        assert [own(piece) for piece in pieces] == [[0, 2], [1], [3, 4], []]

    def test_a_row_that_divides_is_not_filled_up(self) -> None:
        row = pack_batch([sample([5, 6], [7, 8])], [0], "cpu")
        assert cut(row, apart(0, 2)).layout.blocks == (Block(4),)

    @pytest.mark.parametrize("size", [2, 3, 7, 40])
    def test_every_response_token_is_predicted_in_one_piece(self, size: int) -> None:
        row = pack_batch(*random_samples(), "cpu")
        pieces = [cut(row, apart(rank, size)) for rank in range(size)]
        assert len({piece.unique_tokens for piece in pieces}) == 1
        assert sorted(index for piece in pieces for index in own(piece)) == list(range(len(row.predict_N)))

    def test_sampling_masks_follow_their_tokens(self) -> None:
        mask = SamplingMask(np.array([0, 2, 3, 6]), np.array([7, 1, 8, 2, 9, 3], np.int32), allowed=True)
        row = pack_batch([Columns.from_completion([5], [7, 8, 9], [-1.0] * 3, 0, mask)], [0], "cpu")
        second = cut(row, apart(1, 2)).mask
        # Positions 2 and 3 of the row; the last predicts nothing, position 2 predicts 9.
        assert second is not None and second.allowed
        assert (second.offsets_N1.tolist(), second.token_ids.tolist()) == ([0, 3], [2, 9, 3])
        selected = row.mask.select(torch.tensor([2, 0]))  # type: ignore[union-attr]
        assert (selected.offsets_N1.tolist(), selected.token_ids.tolist()) == ([0, 3, 5], [2, 9, 3, 7, 1])


def own(piece: PackedBatch) -> list[int]:
    assert piece.piece is not None
    return piece.piece.own_M.tolist()


def policy_outputs(model: Any, batch: PackedBatch, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs and entropies, of which a loss that weighs every token differently leaves gradients."""
    logprobs, entropy = model(batch, temperature)
    weights = weights_of(len(logprobs))
    (logprobs * weights - 0.3 * entropy * weights.flip(0)).sum().backward()
    return [logprobs.detach(), entropy.detach()]


def value_outputs(model: Any, batch: PackedBatch) -> list[Tensor]:
    values = model(batch)
    (values * weights_of(len(values))).sum().backward()
    return [values.detach()]


def gradients(model: Any) -> Gradients:
    """Of all parameters; none is missing, or ranks would not agree on what to reduce."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_shared_equals_alone(build: Any, outputs: Any, row: PackedBatch, size: int = 2) -> None:
    """Two ranks give the outputs of one, each all of them and to the bit the same, and gradients that add up to its."""
    models = [build() for _ in range(size + 1)]

    def work(group: SequenceGroup) -> tuple[list[Tensor], Gradients]:
        model = models[group.rank]
        return outputs(model, cut(row, group)), gradients(model)

    shared = on_ranks(size, work)
    expected = outputs(models[-1], row)
    for found, _ in shared:
        for values, first, alone in zip(found, shared[0][0], expected, strict=True):
            assert torch.equal(values, first)
            torch.testing.assert_close(values, alone, rtol=1e-5, atol=1e-5)
    for name, alone in gradients(models[-1]).items():
        total = sum(found[name] for _, found in shared)
        difference, norm = float((total - alone).norm()), float(alone.norm())
        assert difference <= 1e-5 * norm, f"{name}: {difference}, of {norm}"


class TestEqualToOneRank:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_logprobs_entropies_and_gradients(self, architecture: str) -> None:
        # Rows of grouped heads and shared prompts, in two of the four with sliding windows that cross the cut.
        row = pack_batch(*random_samples(), "cpu")
        assert_shared_equals_alone(lambda: PolicyModel(make(architecture, "lm", PACKED_ATTENTION)), policy_outputs, row)

    @pytest.mark.parametrize("architecture", ["llama", "gemma3"])
    def test_values(self, architecture: str) -> None:
        row = pack_batch(*random_samples(), "cpu")
        assert_shared_equals_alone(
            lambda: ValueModel(make(architecture, "classifier", PACKED_ATTENTION)), value_outputs, row
        )

    def test_temperature_and_sampling_masks(self) -> None:
        columns, groups = random_samples()
        masked = [with_mask(c) for c in columns]
        row = pack_batch(masked, groups, "cpu")
        assert_shared_equals_alone(
            lambda: PolicyModel(make("qwen2", "lm", PACKED_ATTENTION)),
            lambda model, batch: policy_outputs(model, batch, 0.7),
            row,
        )

    @pytest.mark.parametrize(
        "columns",
        [[], [sample([5, 6], [7])], [sample(list(range(5, 14)), [6])]],
        ids=["no sample", "three tokens", "long prompt"],
    )
    def test_a_rank_that_predicts_nothing_takes_part(self, columns: list[Columns]) -> None:
        row = pack_batch(columns, [0] * len(columns), "cpu")
        assert [] in [own(cut(row, apart(rank, 2))) for rank in range(2)]
        assert_shared_equals_alone(lambda: PolicyModel(make("llama", "lm", PACKED_ATTENTION)), policy_outputs, row)

    def test_layers_that_are_computed_again_exchange_again(self) -> None:
        def build() -> PolicyModel:
            lm = make("gemma3", "lm", PACKED_ATTENTION)
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return PolicyModel(lm.train())

        assert_shared_equals_alone(build, policy_outputs, pack_batch(*random_samples(), "cpu"))


def test_a_rank_computes_its_tokens_and_its_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = pack_batch(*random_samples(), "cpu")
    # 9 + 4 + 13 + 1 + 4 tokens, 5 + 7, and 3 + 17 + 8: 71, so 36 on each of two ranks.
    assert row.unique_tokens == 71
    heads, tokens = set(), list[int]()
    sdpa = attention._sdpa

    def recorded(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        heads.add((query.shape[1], key.shape[1]))
        return sdpa(query, key, *rest)

    monkeypatch.setattr(attention, "_sdpa", recorded)
    models = [make("llama", "lm", PACKED_ATTENTION) for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[1]))

    on_ranks(2, lambda group: PolicyModel(models[group.rank])(cut(row, group), 1.0))
    # Two layers on two ranks; two of four heads and one of two KV heads.
    assert tokens == [36] * 4
    assert heads == {(2, 1)}


def kept_bytes(model: Any, batch: PackedBatch) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(batch, 1.0)
    total = sum(kept.values())
    del outputs
    return total


def test_each_of_two_ranks_keeps_half_of_the_activations() -> None:
    row = synthetic_packed_batch(1, 1, 8, 248, "cpu")
    models = [PolicyModel(make("llama", "lm", PACKED_ATTENTION)) for _ in range(3)]
    shares = on_ranks(2, lambda group: kept_bytes(models[group.rank], cut(row, group)))
    alone = kept_bytes(models[2], row)
    # What is not divided are a few numbers a response token.
    assert all(0.49 * alone < share < 0.51 * alone for share in shares)


class TestArrangement:
    def test_batches_are_pieces(self) -> None:
        shared = Arrangement(CostModel(1.0, 1.0), sequence=apart(1, 2))
        # Two groups of two samples: 5 + 4 + 4 tokens each, 26 in all.
        largest = shared.largest(64, 5, 4, 4, 2, "cpu")
        assert isinstance(largest, PackedBatch) and largest.piece is not None
        assert largest.unique_tokens == 13

    def test_a_model_whose_rows_are_padded_is_refused_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrangement, "TESTED", frozenset())
        padded = PolicyModel(make("llama", "lm", "sdpa"))
        assert not Arrangement.of(padded).packed
        with pytest.raises(ValueError, match=r"sequence_parallel = 2: .*have to be padded: .*sdpa attention"):
            Arrangement.of(padded, apart(0, 2))
