"""From per-token losses to one number: the weight of each token.

The loss of an optimizer step is the sum over all its tokens, on all ranks and in all micro-batches, of weight * loss.
The weights need only the response lengths of the step's samples, which every rank knows from headers. So the result
does not depend on how samples are laid out, and no rank has to ask another for a denominator (invariant 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "sequence_mean_token_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over one optimizer step, all ranks: response tokens, sequences that have any, and the length cap."""

    tokens: int
    sequences: int
    max_new_tokens: int

    @staticmethod
    def of(response_tokens: Sequence[int], max_new_tokens: int) -> Totals:
        """Totals of the samples of one optimizer step, by their response lengths."""
        return Totals(sum(response_tokens), sum(1 for length in response_tokens if length > 0), max_new_tokens)


def token_weight(aggregation: Aggregation, response_tokens: int, totals: Totals) -> float:
    """Weight of each token of a response with `response_tokens` tokens.

    With N tokens and S sequences in the step and n tokens in this response: token_mean 1/N (every token counts the
    same, DAPO, arXiv:2503.14476, eq. 12); sequence_mean 1/S (sum over a response's tokens); sequence_mean_token_mean
    1/(S n) (mean over its tokens, GRPO, arXiv:2402.03300, eq. 3); constant 1/(S max_new_tokens) (Dr. GRPO,
    arXiv:2503.20783, section 3.2). An empty response has weight 0.
    """
    if response_tokens == 0:
        return 0.0
    if aggregation == "token_mean":
        return 1.0 / totals.tokens
    if aggregation == "sequence_mean":
        return 1.0 / totals.sequences
    if aggregation == "sequence_mean_token_mean":
        return 1.0 / (totals.sequences * response_tokens)
    if aggregation == "constant":
        return 1.0 / (totals.sequences * totals.max_new_tokens)
    raise ValueError(
        f"unknown aggregation {aggregation!r}: use token_mean, sequence_mean, sequence_mean_token_mean or constant"
    )
