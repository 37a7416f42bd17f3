"""Which sample goes into which optimizer step, to which rank, into which packed row: pure Python on lengths.

A packed row holds the prompt of a group once for all samples of the group that are in it, so a sample costs less beside
its group. Cost is in floating-point operations, see `CostModel`.

Invariants
- Every sample is in exactly one micro-batch of one rank of one minibatch.
- A group's samples are in one minibatch, unless there are fewer groups than minibatches.
- In a minibatch every rank has the same number of micro-batches, so that all ranks make the same collective calls;
  where a rank has too few samples for that, the rest of its micro-batches are empty.
- A micro-batch has at most `max_tokens` unique tokens. A single longer sample stands alone, or the plan is refused for
  it, as `longer` says; nothing is cut or left out.
- In a micro-batch the samples of a group follow one another, so they can share their prompt.
- What a rank has of a group is in one micro-batch where it fits into one.
- A group is on several ranks only when it doesn't fit into a micro-batch, or when the rank with the highest cost would
  otherwise be more than `tolerance` above the mean.
- The plan is a function of its arguments: every rank computes it for itself and all get the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from rlhf.batching.plan import (
    LongerSequences,
    MicroBatch,
    Minibatch,
    Plan,
    SampleLength,
    by_group,
    check_request,
    split,
    unique_tokens,
)

# How far the most expensive rank may be above the mean before groups are split for it.
TOLERANCE = 0.005

# An end to evening out, far beyond what it takes: at 512 ranks of 8 samples each rank takes part in 2 or 3 exchanges.
EXCHANGES_PER_RANK = 8

# Ranks, from the lowest cost up, whose samples are looked at for an exchange. With 1 the evening out ends early (4,096
# samples on 512 ranks: 1.4 % above the mean instead of 0.5 %); 32 give what 8 give, in twice the time.
PARTNERS = 8


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of a pass: `linear` for each unique token, `attention` for each pair of a token and one before it."""

    linear: float
    attention: float

    @staticmethod
    def of_decoder(parameters: int, layers: int, heads: int, head_dim: int) -> CostModel:
        """Forward operations of a decoder: 2 for each parameter of its layers, and 4 for each pair, head and dimension.

        The second is a product of query and key and one of weight and value; see Kaplan et al. (2020), table 1. A
        backward pass costs twice as much of both, which changes no comparison.
        """
        return CostModel(2.0 * parameters, 4.0 * layers * heads * head_dim)

    def prompt(self, sample: SampleLength) -> float:
        """Cost of the sample's prompt, once in a micro-batch: its P tokens, and P^2 / 2 pairs."""
        tokens = sample.prompt_tokens
        return self.linear * tokens + self.attention * tokens * tokens / 2

    def response(self, sample: SampleLength) -> float:
        """Cost of the sample's response: its R tokens, and R (P + R / 2) pairs."""
        tokens = sample.response_tokens
        return self.linear * tokens + self.attention * tokens * (sample.prompt_tokens + tokens / 2)

    def total(self, samples: Iterable[SampleLength]) -> float:
        """Cost of samples in one micro-batch."""
        members = list(samples)
        prompts = {sample.group_id: self.prompt(sample) for sample in members}
        return sum(prompts.values()) + sum(map(self.response, members))


def plan_packed(
    samples: Sequence[SampleLength],
    ranks: int,
    minibatches: int,
    max_tokens: int,
    cost: CostModel,
    tolerance: float = TOLERANCE,
    longer: LongerSequences = "alone",
) -> Plan:
    """Plan one pass over `samples`.

    There are as many minibatches as asked for, or one a sample where there are fewer samples. Raises `ValueError` on
    a sample id that occurs twice, an empty sample, a group with prompts of different lengths, counts below 1, and with
    `longer` "refuse" on a sample of more than `max_tokens`.
    """
    check_request(samples, ranks, minibatches, max_tokens, longer)
    _check_prompts(samples)
    parts = split(samples, minibatches)
    return Plan(tuple(_plan_minibatch(part, ranks, max_tokens, cost, tolerance) for part in parts))


def _check_prompts(samples: Sequence[SampleLength]) -> None:
    prompts: dict[int, int] = {}
    for sample in samples:
        expected = prompts.setdefault(sample.group_id, sample.prompt_tokens)
        if sample.prompt_tokens != expected:
            raise ValueError(
                f"sample {sample.sample_id} has a prompt of {sample.prompt_tokens} tokens, others of its group "
                f"{sample.group_id} of {expected}: samples of a group share their prompt"
            )


def _plan_minibatch(
    samples: Sequence[SampleLength], ranks: int, max_tokens: int, cost: CostModel, tolerance: float
) -> Minibatch:
    """Balance over ranks, then cut each rank's share into equally many micro-batches, the most expensive first."""
    parts = [part for group in by_group(samples) for part in _fitting_parts(group, max_tokens)]
    shares = _Shares(parts, ranks, cost)
    shares.even_out(tolerance)
    cut = [_cut(share, max_tokens) for share in shares.samples()]
    count = max(len(micro_batches) for micro_batches in cut)
    return Minibatch(
        tuple(
            tuple(MicroBatch(tuple(row)) for row in sorted(_stretch(rows, count), key=cost.total, reverse=True))
            for rows in cut
        )
    )


def _fitting_parts(group: Sequence[SampleLength], max_tokens: int) -> list[list[SampleLength]]:
    """Cut samples of one group into few parts that fit into a micro-batch each: first fit, longest first."""
    if group[0].prompt_tokens + sum(sample.response_tokens for sample in group) <= max_tokens:
        return [list(group)]
    parts = list[list[SampleLength]]()
    room = list[int]()
    for sample in sorted(group, key=lambda sample: -sample.response_tokens):
        fits = next((index for index, left in enumerate(room) if sample.response_tokens <= left), None)
        if fits is None:
            parts.append([sample])
            # Below zero where the sample is alone longer than a micro-batch: nothing joins it.
            room.append(max_tokens - sample.tokens)
        else:
            parts[fits].append(sample)
            room[fits] -= sample.response_tokens
    return parts


# A sample on a rank: cost of its response, its place in the batch, and itself.
_Item = tuple[float, int, SampleLength]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An item of one rank, by index, that goes to the rank `target`, and the one that comes back, if any."""

    target: int
    item: int
    back: int | None


class _Shares:
    """What each rank has, and its cost, with one prompt for each group that it has a sample of."""

    def __init__(self, parts: Sequence[list[SampleLength]], ranks: int, cost: CostModel) -> None:
        """Give parts to ranks, the most expensive first, each to the rank with the lowest cost so far."""
        self._prompts = {part[0].group_id: cost.prompt(part[0]) for part in parts}
        # The cheapest first.
        self._ranks: list[list[_Item]] = [[] for _ in range(ranks)]
        self._counts: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.costs = [0.0] * ranks
        order = iter(range(sum(map(len, parts))))
        items = [[(cost.response(sample), next(order), sample) for sample in part] for part in parts]
        totals = [sum(item[0] for item in part) + self._prompts[part[0][2].group_id] for part in items]
        lightest = [(0.0, rank) for rank in range(ranks)]
        for index in sorted(range(len(items)), key=lambda index: -totals[index]):
            _, rank = heappop(lightest)
            for item in items[index]:
                self.costs[rank] += item[0] + self._joining(rank, item[2].group_id)
                self._count(rank, item[2].group_id, 1)
            self._ranks[rank] += items[index]
            heappush(lightest, (self.costs[rank], rank))
        for share in self._ranks:
            share.sort()
        self.total = sum(self.costs)
        # Ranks by cost.
        self.order = sorted(lightest)

    def samples(self) -> list[list[SampleLength]]:
        """Samples of each rank, in the order of the batch."""
        return [[item[2] for item in sorted(share, key=lambda item: item[1])] for share in self._ranks]

    def even_out(self, tolerance: float) -> None:
        """Move and exchange samples of the rank with the highest cost until that is near enough to the mean."""
        for _ in range(EXCHANGES_PER_RANK * len(self.costs)):
            highest, source = self.order[-1]
            if highest <= (1 + tolerance) * self.total / len(self.costs):
                return
            exchange = self._best_exchange(source)
            if exchange is None:
                return
            self._apply(source, exchange)

    def _best_exchange(self, source: int) -> _Exchange | None:
        """The exchange after which the higher of both costs is lowest; None where no exchange makes it lower."""
        best, found = self.costs[source], None
        for exchange in self._candidates(source):
            outcome = max(self._costs_after(source, exchange))
            if outcome < best:
                best, found = outcome, exchange
        return found

    def _candidates(self, source: int) -> Iterator[_Exchange]:
        """Each item to the rank of lowest cost, and against the items of low ranks that would even out most."""
        lowest = [rank for _, rank in self.order[:PARTNERS] if rank != source]
        for index, item in enumerate(self._ranks[source]):
            for target in lowest:
                if target == lowest[0]:
                    yield _Exchange(target, index, None)
                offers = self._ranks[target]
                near = bisect_left(offers, (item[0] - (self.costs[source] - self.costs[target]) / 2,))
                for back in (near - 1, near):
                    if 0 <= back < len(offers):
                        yield _Exchange(target, index, back)

    def _costs_after(self, source: int, exchange: _Exchange) -> tuple[float, float]:
        """Costs of both ranks after an exchange."""
        target, item = exchange.target, self._ranks[source][exchange.item]
        group = item[2].group_id
        here, there = self.costs[source] - item[0], self.costs[target] + item[0]
        if exchange.back is not None:
            back = self._ranks[target][exchange.back]
            here, there = here + back[0], there - back[0]
            if back[2].group_id == group:
                return here, there
            here += self._joining(source, back[2].group_id)
            there -= self._leaving(target, back[2].group_id)
        return here - self._leaving(source, group), there + self._joining(target, group)

    def _apply(self, source: int, exchange: _Exchange) -> None:
        target = exchange.target
        after = self._costs_after(source, exchange)
        for rank, cost in zip((source, target), after, strict=True):
            self.order.pop(bisect_left(self.order, (self.costs[rank], rank)))
            insort(self.order, (cost, rank))
            self.total += cost - self.costs[rank]
            self.costs[rank] = cost
        moves = [(source, target, self._ranks[source].pop(exchange.item))]
        if exchange.back is not None:
            moves.append((target, source, self._ranks[target].pop(exchange.back)))
        for origin, goal, item in moves:
            insort(self._ranks[goal], item)
            self._count(origin, item[2].group_id, -1)
            self._count(goal, item[2].group_id, 1)

    def _joining(self, rank: int, group: int) -> float:
        """Cost of the group's prompt for a rank that has none of its samples."""
        return 0.0 if self._counts[rank].get(group) else self._prompts[group]

    def _leaving(self, rank: int, group: int) -> float:
        """Cost of the group's prompt for a rank that has a single one of its samples."""
        return self._prompts[group] if self._counts[rank][group] == 1 else 0.0

    def _count(self, rank: int, group: int, change: int) -> None:
        counts = self._counts[rank]
        counts[group] = counts.get(group, 0) + change


def _cut(share: Sequence[SampleLength], max_tokens: int) -> list[list[SampleLength]]:
    """Cut a rank's share into few micro-batches: parts of groups, first fit, longest first."""
    parts = [part for group in by_group(share) for part in _fitting_parts(group, max_tokens)]
    rows = list[list[SampleLength]]()
    room = list[int]()
    for length, part in sorted(((unique_tokens(part), part) for part in parts), key=lambda pair: -pair[0]):
        # Two parts of one group never meet: they would have been one, which is shorter.
        fits = next((index for index, left in enumerate(room) if length <= left), None)
        if fits is None:
            rows.append(list(part))
            room.append(max_tokens - length)
        else:
            rows[fits] += part
            room[fits] -= length
    return rows


def _stretch(rows: Sequence[list[SampleLength]], count: int) -> list[list[SampleLength]]:
    """Make `count` micro-batches of fewer: divide those with the most groups; of a single one that gives an empty one.

    A group is not divided for it, since that would cost a prompt and an empty micro-batch costs nothing.
    """
    stretched = [by_group(row) for row in rows] or [[]]
    while len(stretched) < count:
        most = max(range(len(stretched)), key=lambda i: len(stretched[i]))
        groups = stretched[most]
        stretched[most : most + 1] = [groups[: len(groups) // 2], groups[len(groups) // 2 :]]
    return [[sample for group in groups for sample in group] for groups in stretched]
