"""What tokens of a plan are worth: each is useful, computed more than once, or padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf.batching.plan import MicroBatch, Minibatch, SampleLength, unique_tokens

# A micro-batch without samples takes part in collectives with a row of two tokens.
EMPTY_TOKENS = 2


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that all ranks compute together.

    `useful`: all responses, and each group's prompt once. `duplicated`: prompts computed again, for a group that is in
    several micro-batches or in padded rows. `padding`: what belongs to no sample, empty micro-batches included.
    """

    useful: int = 0
    duplicated: int = 0
    padding: int = 0

    @property
    def computed(self) -> int:
        """All tokens."""
        return self.useful + self.duplicated + self.padding

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.useful + other.useful, self.duplicated + other.duplicated, self.padding + other.padding)


def count_tokens(minibatch: Minibatch, packed: bool) -> TokenCounts:
    """Count the tokens of one optimizer step, laid out in packed rows or in padded ones."""
    micro_batches = [micro_batch for rank in minibatch.ranks for micro_batch in rank]
    useful = unique_tokens(samples_of(minibatch))
    of_samples = sum(_sample_tokens(micro_batch, packed) for micro_batch in micro_batches)
    return TokenCounts(useful, of_samples - useful, sum(_computed(m, packed) for m in micro_batches) - of_samples)


def samples_of(minibatch: Minibatch) -> Iterable[SampleLength]:
    """The samples of all ranks."""
    return (sample for rank in minibatch.ranks for micro_batch in rank for sample in micro_batch.samples)


def _sample_tokens(micro_batch: MicroBatch, packed: bool) -> int:
    return micro_batch.unique_tokens if packed else sum(sample.tokens for sample in micro_batch.samples)


def _computed(micro_batch: MicroBatch, packed: bool) -> int:
    if not micro_batch.samples:
        return EMPTY_TOKENS
    return micro_batch.unique_tokens if packed else micro_batch.padded_tokens
