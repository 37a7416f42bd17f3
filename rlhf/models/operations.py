"""Floating-point operations that a training pass over samples needs, however it is computed.

After PaLM (Chowdhery et al., arXiv:2204.02311, appendix B), where a token takes 6 N + 12 L H Q T: forward 2 for each
of N parameters, and in each of L layers 4 for each of H heads of size Q and each of T tokens that are attended to;
backward twice as much. What is computed again, for whatever reason, doesn't count. Here, unlike there:

- a prompt counts once for its group;
- N are the matrices of the layers. The output head counts at the positions that predict a response token, and looking
  an embedding up takes no product;
- a token attends to those that it sees, itself included: not to later ones, and not beyond a sliding window;
- a matrix that is not trained has no gradient of its own, so it takes 4 and not 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlhf.batching import SampleLength
from rlhf.models.packed import layer_windows


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations forward and backward: for each token, each response token, and each pair of tokens in one layer.

    `windows` are the sliding windows of the layers, None for a layer without.
    """

    per_token: float
    per_prediction: float
    per_pair: float
    windows: tuple[int | None, ...]

    @staticmethod
    def of(model: Any) -> Operations:
        """Those of a model of ours (with the transformers model as `lm`), also where ZeRO stage 3 has sharded it."""
        config = model.lm.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        embedding = model.lm.get_input_embeddings().weight
        head = (model.lm.get_output_embeddings() or model.lm.score).weight
        matrices = [p for p in model.lm.parameters() if len(_shape(p)) > 1 and p is not embedding and p is not head]
        windows = tuple(layer_windows(config))
        return Operations(sum(map(_product, matrices)), _product(head), 12.0 * heads * head_dim, windows)

    def total(self, samples: Iterable[SampleLength]) -> float:
        """Operations of a pass over these samples, each group's prompt once."""
        members = list(samples)
        prompts = {sample.group_id: sample.prompt_tokens for sample in members}
        predictions = sum(sample.response_tokens for sample in members)
        pairs = 0
        for window in self.windows:
            seen = {sample.group_id: _pairs(sample.prompt_tokens, window) for sample in members}
            pairs += sum(seen.values()) + sum(_pairs(s.tokens, window) - seen[s.group_id] for s in members)
        tokens = sum(prompts.values()) + predictions
        return self.per_token * tokens + self.per_prediction * predictions + self.per_pair * pairs


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _product(weight: nn.Parameter) -> float:
    """Operations of the products with a matrix, for one vector: forward, its gradient, and the matrix's own."""
    return (6.0 if weight.requires_grad else 4.0) * getattr(weight, "ds_numel", weight.numel())


def _pairs(tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, in a sequence of so many tokens: the sum of min(t, window)."""
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near
