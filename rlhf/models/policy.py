"""A causal LM as a module that returns token log-probs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlhf.models.arrangement import Batch
from rlhf.models.backbone import hidden_states
from rlhf.models.logprobs import HeadShape, token_logprobs
from rlhf.models.masks import TokenMask


class PolicyModel(nn.Module):
    """Backbone, then the output head on the positions that predict response tokens."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        head = lm.get_output_embeddings()
        if head is None or not hasattr(lm, lm.base_model_prefix):
            raise ValueError(f"{type(lm).__name__} has no separate backbone and output head: it can't be trained here")
        self.head = LogProbHead(head, HeadShape.of(lm.config))

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N] of the batch's response tokens at `temperature`; float32, nats.

        Log-probs are of the distribution that the engine could sample from, where the batch has a sampling mask. For a
        piece of a row they are those of the whole row.
        """
        hidden_NH = hidden_states(self.lm, batch)[batch.predict_N]
        logprobs_N, entropy_N = self.head(hidden_NH, batch.targets_N, temperature, batch.mask)
        return batch.whole(logprobs_N), batch.whole(entropy_N)


class LogProbHead(nn.Module):
    """The output head as a function from hidden states to log-probs.

    It uses the parameters of the model's own head without owning them (in tied models they are the embedding's), so
    under ZeRO stage 3 it has to be registered as their user: `borrowed` lists them.
    """

    def __init__(self, head: nn.Module, shape: HeadShape) -> None:
        super().__init__()
        # In a tuple, so that torch doesn't register the head a second time under this module.
        self._head = (head,)
        self._shape = shape

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """Parameters that belong to another module and are used in this one's forward pass."""
        return list(self._head[0].parameters(recurse=False))

    def forward(
        self, hidden_NH: Tensor, targets_N: Tensor, temperature: float, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N]."""
        head: Any = self._head[0]
        bias = getattr(head, "bias", None)
        return token_logprobs(hidden_NH, head.weight, bias, targets_N, temperature, self._shape, mask=mask)
