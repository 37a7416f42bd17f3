"""Which sample goes into which optimizer step, to which rank, into which micro-batch: pure Python on lengths.

Invariants
- Every sample is in exactly one micro-batch of one rank of one minibatch.
- A group's samples are in one minibatch, unless there are fewer groups than minibatches.
- In a minibatch every rank has the same number of micro-batches, so that all ranks make the same collective calls;
  where a rank has too few samples for that, the rest of its micro-batches are empty.
- A micro-batch's padded size, rows times longest, is at most `max_tokens`. A single longer sample stands alone, or the
  plan is refused for it, as `longer` says; nothing is cut or left out.
- A rank's load in tokens exceeds another's by at most the longest sample of the minibatch.
- The plan is a function of its arguments: every rank computes it for itself and all get the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# What becomes of a sample that is longer than a micro-batch may be.
LongerSequences = Literal["alone", "refuse"]


@dataclass(frozen=True, slots=True)
class SampleLength:
    """What planning needs to know of a sample; `tokens` are prompt and response together.

    Samples of one group have the same prompt of `prompt_tokens`, which a packed row holds once.
    """

    sample_id: str
    group_id: int
    tokens: int
    prompt_tokens: int = 0

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.tokens - self.prompt_tokens


def unique_tokens(samples: Iterable[SampleLength]) -> int:
    """Tokens of all responses, and of one prompt for each group."""
    prompts: dict[int, int] = {}
    total = 0
    for sample in samples:
        prompts[sample.group_id] = sample.prompt_tokens
        total += sample.response_tokens
    return total + sum(prompts.values())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together; possibly none.

    In padded rows the longest comes first, in a packed row the samples of a group follow one another.
    """

    samples: tuple[SampleLength, ...]

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids in row order."""
        return tuple(sample.sample_id for sample in self.samples)

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Group ids in row order."""
        return tuple(sample.group_id for sample in self.samples)

    @property
    def unique_tokens(self) -> int:
        """Tokens of a packed row: each group's prompt once, and all responses."""
        return unique_tokens(self.samples)

    @property
    def padded_tokens(self) -> int:
        """Rows times longest."""
        return len(self.samples) * max((sample.tokens for sample in self.samples), default=0)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One optimizer step: `ranks[r]` are the micro-batches of rank r, equally many on each."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids of all ranks' samples."""
        return tuple(i for rank in self.ranks for micro_batch in rank for i in micro_batch.sample_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """The optimizer steps of one pass over a batch, in order."""

    minibatches: tuple[Minibatch, ...]


def plan(
    samples: Sequence[SampleLength], ranks: int, minibatches: int, max_tokens: int, longer: LongerSequences = "alone"
) -> Plan:
    """Plan one pass over `samples`.

    There are as many minibatches as asked for, or one a sample where there are fewer samples. Raises `ValueError` on
    a sample id that occurs twice, an empty sample, counts below 1, and with `longer` "refuse" on a sample of more than
    `max_tokens`.
    """
    check_request(samples, ranks, minibatches, max_tokens, longer)
    return Plan(tuple(_plan_minibatch(part, ranks, max_tokens) for part in split(samples, minibatches)))


def check_request(
    samples: Sequence[SampleLength], ranks: int, minibatches: int, max_tokens: int, longer: LongerSequences
) -> None:
    """Raise `ValueError` on counts below 1, samples that are empty or refused for their length, and ids used twice."""
    for name, value in (("ranks", ranks), ("minibatches", minibatches), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it has to be at least 1")
    seen: set[str] = set()
    for sample in samples:
        if sample.sample_id in seen:
            raise ValueError(f"sample {sample.sample_id} is in the batch twice: every sample is trained on once")
        if sample.tokens < 1:
            raise ValueError(f"sample {sample.sample_id} has {sample.tokens} tokens: it needs at least one")
        if longer == "refuse" and sample.tokens > max_tokens:
            raise ValueError(
                f"sample {sample.sample_id} has {sample.tokens} tokens, more than the {max_tokens} of a micro-batch, "
                "and longer sequences are refused"
            )
        seen.add(sample.sample_id)


def by_group(samples: Iterable[SampleLength]) -> list[list[SampleLength]]:
    """The samples of each group, groups in the order of their first samples."""
    groups: dict[int, list[SampleLength]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def split(samples: Sequence[SampleLength], minibatches: int) -> list[list[SampleLength]]:
    """Deal whole groups to minibatches, each to the one with the fewest samples so far."""
    groups = by_group(samples)
    if len(groups) < minibatches:
        # Too few groups to keep them whole: deal single samples.
        groups = [[sample] for sample in samples]
    parts: list[list[SampleLength]] = [[] for _ in range(min(minibatches, len(groups)))]
    for group in groups:
        min(parts, key=len).extend(group)
    return parts


def _plan_minibatch(samples: Sequence[SampleLength], ranks: int, max_tokens: int) -> Minibatch:
    """Balance over ranks by tokens (longest first, to the least loaded), then cut each rank's share."""
    longest_first = sorted(samples, key=lambda sample: -sample.tokens)
    shares: list[list[SampleLength]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in longest_first:
        rank = min(range(ranks), key=loads.__getitem__)
        shares[rank].append(sample)
        loads[rank] += sample.tokens
    cut = [_cut(share, max_tokens) for share in shares]
    count = max(len(micro_batches) for micro_batches in cut)
    return Minibatch(
        tuple(tuple(MicroBatch(tuple(rows)) for rows in _stretch(micro_batches, count)) for micro_batches in cut)
    )


def _cut(longest_first: Sequence[SampleLength], max_tokens: int) -> list[list[SampleLength]]:
    """Cut a share into micro-batches; neighbours in length go together, so little is padded."""
    micro_batches: list[list[SampleLength]] = []
    for sample in longest_first:
        rows = micro_batches[-1] if micro_batches else None
        if rows is not None and (len(rows) + 1) * rows[0].tokens <= max_tokens:
            rows.append(sample)
        else:
            micro_batches.append([sample])
    return micro_batches


def _stretch(micro_batches: list[list[SampleLength]], count: int) -> list[list[SampleLength]]:
    """Make `count` micro-batches of fewer: halve those with the most rows, and add empty ones when all have one."""
    stretched = list(micro_batches)
    while len(stretched) < count:
        most = max(range(len(stretched)), key=lambda i: len(stretched[i]), default=None)
        if most is None or len(stretched[most]) < 2:
            stretched.append([])
            continue
        rows = stretched[most]
        stretched[most : most + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return stretched
