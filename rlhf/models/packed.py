"""Samples as one packed row: no padding, and a prompt once for all samples of its group that follow one another.

Invariants
- Response tokens stand in the order of the samples that were given, as in the padded batch, so arrays over them [N]
  mean the same in both.
- Samples share a prompt only when they follow one another, are of one group, and their prompts are the same ids.
- What a model computes for a sample is what it computes for that sample alone, gradients included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.models.attention import PACKED_ATTENTION, Block, PackedLayout, block_coordinates
from rlhf.models.batch import pad_batch
from rlhf.models.masks import TokenMask, join_masks, sample_names
from rlhf.models.sequence import Piece, SequenceGroup, SequenceLayout
from rlhf.trajectories import Columns

# How far hidden states of a packed row may be from those of padded rows, relative to their norm. SmolLM2 (30 layers) is
# off by 1e-6 in float32 and 0.03 in bfloat16, and by 0.6 and more where samples see each other or not their prompt.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B samples in one row of L tokens, and N response tokens over all samples, sample by sample.

    `input_ids_1L`, `position_ids_1L`; `lengths_B`, tokens of each sample with its prompt; `last_B`, where in the row
    its last token stands. For each response token its sample, its position t in the sample, its id, and where in the
    row the token stands that predicts it: position t - 1, for the first of a response the last of the prompt, which
    may be shared. All int64 on one device. `total_tokens` counts every sample with its own prompt. `mask` is None
    where every id could be sampled.

    With a `piece` this is one rank's part of a row (see `cut`): L are its tokens, N the response tokens that are
    predicted in it, `predict_N` is where in it they are, and `layout` is still that of the whole row.
    """

    input_ids_1L: Tensor
    position_ids_1L: Tensor
    layout: PackedLayout
    lengths_B: Tensor
    last_B: Tensor
    rows_N: Tensor
    positions_N: Tensor
    targets_N: Tensor
    predict_N: Tensor
    total_tokens: int
    mask: TokenMask | None = None
    piece: Piece | None = None

    @property
    def unique_tokens(self) -> int:
        """L: the tokens that the model computes."""
        return self.input_ids_1L.shape[1]

    def whole(self, values_N: Tensor) -> Tensor:
        """What was computed for this batch's response tokens, for those of the whole row; collective for a piece."""
        if self.piece is None:
            return values_N
        return self.piece.group.assemble(values_N, self.piece.own_M, self.piece.total)


def pack_batch(
    columns: Sequence[Columns],
    groups: Sequence[int],
    device: torch.device | str,
    sample_ids: Sequence[str] | None = None,
) -> PackedBatch:
    """Lay samples out in one row, each run of samples of one group with one copy of their prompt.

    `groups` are the samples' group ids. A prompt is what comes before the first sampled token; tokens after that which
    were not sampled (the turns of a conversation) belong to their sample alone and are not predicted. With no samples
    the row has two tokens and one of them is a response: a pass over it makes the same collective calls as any other,
    and its loss gets weight 0.

    Raises `ValueError` for a sample whose first token was sampled, and for sampling masks that don't fit (see
    `join_masks`), naming the sample by `sample_ids`, or by its row.
    """
    if not columns:
        return synthetic_packed_batch(1, 1, 1, 1, device)
    names = sample_names(len(columns), sample_ids)
    prompts = [_prompt_tokens(sample, name) for sample, name in zip(columns, names, strict=True)]
    blocks, ids, row_index = list[Block](), list[npt.NDArray[np.int32]](), list[npt.NDArray[np.int64]]()
    start = 0
    for run in _runs(columns, groups, prompts):
        samples, shared = [columns[i].token_ids for i in run], prompts[run[0]]
        own = tuple(len(sample) - shared for sample in samples)
        block = Block(shared, own) if len(run) > 1 else Block(shared + own[0])
        ids += [samples[0][:shared], *(sample[shared:] for sample in samples)]
        begins = start + shared + np.cumsum([0, *own[:-1]])
        for begin, length in zip(begins, own, strict=True):
            row_index.append(np.concatenate([np.arange(start, start + shared), np.arange(begin, begin + length)]))
        blocks.append(block)
        start += block.tokens
    return _packed(columns, np.concatenate(ids), blocks, row_index, join_masks(columns, names, device), device)


def synthetic_packed_batch(
    groups: int, samples: int, prompt_tokens: int, response_tokens: int, device: torch.device | str
) -> PackedBatch:
    """A batch of `groups` times `samples` samples that holds only token 0, to find out whether the shape fits."""
    sample = Columns.from_completion([0] * prompt_tokens, [0] * response_tokens, [0.0] * response_tokens, 0)
    of_group = np.repeat(np.arange(groups), samples).tolist()
    return pack_batch([sample] * (groups * samples), of_group, device)


def cut(batch: PackedBatch, group: SequenceGroup) -> PackedBatch:
    """This rank's piece of a row that the ranks of `group` share: its tokens in equal parts, in the order of the ranks.

    A row of another length is filled up with a block of tokens that belong to no sample. Samples (`lengths_B`,
    `last_B`) stay those of the whole row.
    """
    size = -(-batch.unique_tokens // group.size)
    padding = torch.arange(size * group.size - batch.unique_tokens, device=batch.input_ids_1L.device)
    blocks = [*batch.layout.blocks, *([Block(len(padding))] if len(padding) else [])]
    here = slice(group.rank * size, (group.rank + 1) * size)
    own_M = torch.nonzero(batch.predict_N // size == group.rank).flatten()
    return replace(
        batch,
        input_ids_1L=torch.cat([batch.input_ids_1L, torch.zeros_like(padding)[None]], 1)[:, here],
        position_ids_1L=torch.cat([batch.position_ids_1L, padding[None]], 1)[:, here],
        layout=SequenceLayout(blocks, group),
        rows_N=batch.rows_N[own_M],
        positions_N=batch.positions_N[own_M],
        targets_N=batch.targets_N[own_M],
        predict_N=batch.predict_N[own_M] - here.start,
        mask=None if batch.mask is None else batch.mask.select(own_M),
        piece=Piece(group, own_M, len(batch.predict_N)),
    )


def _prompt_tokens(sample: Columns, name: str) -> int:
    """Tokens before the first one that was sampled; all, where none was."""
    sampled = np.flatnonzero(sample.loss_mask)
    if len(sampled) and sampled[0] == 0:
        raise ValueError(f"{name}: its first token is marked as sampled, and nothing predicts it")
    return int(sampled[0]) if len(sampled) else len(sample.token_ids)


def _runs(columns: Sequence[Columns], groups: Sequence[int], prompts: Sequence[int]) -> Iterator[list[int]]:
    """Samples in a row, by index, that can share a prompt."""
    run = [0]
    for this in range(1, len(columns)):
        first = run[0]
        same_prompt = groups[this] == groups[first] and np.array_equal(
            columns[this].token_ids[: prompts[this]], columns[first].token_ids[: prompts[first]]
        )
        if same_prompt:
            run.append(this)
        else:
            yield run
            run = [this]
    yield run


def _packed(
    columns: Sequence[Columns],
    ids_L: npt.NDArray[np.int32],
    blocks: Sequence[Block],
    row_index: Sequence[npt.NDArray[np.int64]],
    mask: TokenMask | None,
    device: torch.device | str,
) -> PackedBatch:
    """The batch, given where in the row each sample's tokens stand."""
    positions = [np.flatnonzero(sample.loss_mask) for sample in columns]
    lengths = np.array([len(sample.token_ids) for sample in columns], np.int64)
    rows_N = np.repeat(np.arange(len(columns)), [len(p) for p in positions])
    predict_N = np.concatenate([index[p - 1] for index, p in zip(row_index, positions, strict=True)])
    targets_N = np.concatenate([sample.token_ids[sample.loss_mask] for sample in columns])

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return PackedBatch(
        input_ids_1L=tensor(ids_L[None]),
        position_ids_1L=torch.cat([block_coordinates(block, "cpu")[1] for block in blocks])[None].to(device),
        layout=PackedLayout(blocks),
        lengths_B=tensor(lengths),
        last_B=tensor(np.array([index[-1] for index in row_index])),
        rows_N=tensor(rows_N),
        positions_N=tensor(np.concatenate(positions)),
        targets_N=tensor(targets_N),
        predict_N=tensor(predict_N),
        total_tokens=int(lengths.sum()),
        mask=mask,
    )


def packed_hidden_states(lm: Any, batch: PackedBatch) -> Tensor:
    """Last hidden states [L, H] of the backbone of a transformers model that was loaded with `PACKED_ATTENTION`."""
    return _row_states(lm, batch, batch.layout)


def _row_states(lm: Any, batch: PackedBatch, layout: PackedLayout) -> Tensor:
    backbone = getattr(lm, lm.base_model_prefix)
    # transformers takes a mask with four axes as it is and makes none of its own; what it holds is never read.
    unread = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=batch.input_ids_1L.device)
    output = backbone(
        input_ids=batch.input_ids_1L,
        position_ids=batch.position_ids_1L,
        attention_mask=unread,
        use_cache=False,
        packed=layout,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


class _ObservedLayout(PackedLayout):
    """A layout that notes the sliding window of each layer that attends by it."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(blocks)
        self.windows: list[int | None] = []

    def attend(
        self, query_1HLD: Tensor, key_1KLD: Tensor, value_1KLD: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        self.windows.append(window)
        return super().attend(query_1HLD, key_1KLD, value_1KLD, scale, window)


def can_pack(model: Any) -> str | None:
    """Find out whether a model computes the same on packed rows as on padded ones; None when it does, else why not.

    `model` is a transformers model, or one of ours with it as `lm`. Its hidden states for two small random groups have
    to be equal both ways, within 1e-4 in float32 and 0.1 in bfloat16 relative to their norm, and every layer has to
    ask for the sliding window that the configuration gives it, since these groups may be shorter than that. Under ZeRO
    stage 3 this is a collective call.
    """
    lm = getattr(model, "lm", model)
    name, config = type(lm).__name__, lm.config.get_text_config()
    if config._attn_implementation != PACKED_ATTENTION:
        return f"{name} was loaded with {config._attn_implementation} attention, packed rows need {PACKED_ATTENTION}"
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        return f"{name} has layers of type {', '.join(sorted(odd))}, which packed rows don't have"
    expected = layer_windows(config)
    try:
        windows, difference = _compare(lm, config.vocab_size)
    # Any architecture may come here, and what it raises on an unknown kind of input is not known.
    except Exception as error:
        return f"{name} fails on a packed row: {error}"
    if windows != expected:
        return f"attention layers of {name} ask for sliding windows {windows}, its configuration says {expected}"
    tolerance = TOLERANCES.get(lm.dtype, min(TOLERANCES.values()))
    # Written so that NaN is a difference too.
    if not difference <= tolerance:
        return (
            f"hidden states of {name} differ by {difference:.2g} between packed and padded rows ({tolerance:g} allowed)"
        )
    return None


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer by a transformers configuration."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[: config.num_hidden_layers]]


def _compare(lm: Any, vocabulary: int) -> tuple[list[int | None], float]:
    """Windows that layers asked for on packed rows, and the largest relative difference of a hidden state to padded."""
    rng = np.random.default_rng(0)
    columns, groups = [], []
    for group, (prompt, responses) in enumerate([(7, (4, 9, 6)), (40, (48, 40, 43))]):
        prompt_ids = rng.integers(vocabulary, size=prompt).tolist()
        for response in responses:
            response_ids = rng.integers(vocabulary, size=response).tolist()
            columns.append(Columns.from_completion(prompt_ids, response_ids, [0.0] * response, 0))
            groups.append(group)
    device = lm.get_input_embeddings().weight.device
    batch, padded = pack_batch(columns, groups, device), pad_batch(columns, device)
    layout = _ObservedLayout(batch.layout.blocks)
    backbone = getattr(lm, lm.base_model_prefix)
    with torch.no_grad():
        found = _row_states(lm, batch, layout)
        plain = backbone(
            input_ids=padded.input_ids_BL, position_ids=padded.position_ids_BL, use_cache=False
        ).last_hidden_state
    lasts = torch.arange(len(columns), device=device), padded.lengths_B - 1
    expected = torch.cat([plain[padded.rows_N, padded.positions_N - 1], plain[lasts]]).float()
    difference = torch.cat([found[batch.predict_N], found[batch.last_B]]).float() - expected
    return layout.windows, float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())
