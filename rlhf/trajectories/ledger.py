"""The sample ledger: every sample that was drawn is in exactly one place.

Invariant 2: `drawn = trained + filtered + failed + stale + discarded + buffered + in_flight`. Each term is counted at
its own event and none by subtraction, so a lost or doubled sample shows as an imbalance. `buffered` and `in_flight`
are stocks: their events move samples in and out. `redone` stands beside the balance: samples of steps that were lost
with whoever was killed, and were done again from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["trained", "filtered", "failed", "stale", "discarded"]


class LedgerError(RuntimeError):
    """The ledger doesn't balance: a sample was lost or counted twice."""


@dataclass(slots=True)
class Ledger:
    """Counts of samples over the run so far."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    stale: int = 0
    discarded: int = 0
    buffered: int = 0
    in_flight: int = 0
    redone: int = 0

    def draw(self, samples: int) -> None:
        """Samples were requested: they are in flight from now on."""
        self.drawn += samples
        self.in_flight += samples

    def buffer(self, samples: int) -> None:
        """Finished samples came in from the engines and wait to be used."""
        self.in_flight -= samples
        self.buffered += samples

    def give_back(self, samples: int) -> None:
        """Finished samples were not used and will be generated anew: they are in flight again."""
        self.buffered -= samples
        self.in_flight += samples

    def settle(self, outcome: Outcome, samples: int, *, source: Literal["buffered", "in_flight"] = "buffered") -> None:
        """Samples left `source` for good, with this outcome."""
        setattr(self, source, getattr(self, source) - samples)
        setattr(self, outcome, getattr(self, outcome) + samples)

    def check(self) -> None:
        """Raise `LedgerError` with all terms unless they balance and none is negative."""
        terms = {name: count for name, count in asdict(self).items() if name != "redone"}
        accounted = sum(terms.values()) - terms["drawn"]
        if accounted != terms["drawn"] or min(terms.values()) < 0:
            listed = ", ".join(f"{name} {count}" for name, count in terms.items())
            raise LedgerError(
                f"sample ledger out of balance: {terms['drawn']} drawn but {accounted} accounted for ({listed})"
            )

    def metrics(self) -> dict[str, float]:
        """`ledger/<term>`: totals so far."""
        return {f"ledger/{name}": float(count) for name, count in asdict(self).items()}

    def rewound(self, last: Mapping[str, float]) -> None:
        """The run goes on from a checkpoint: what was drawn after it, by the last metrics that were written, is redone.

        `last` is empty where nothing was written.
        """
        if last.get("ledger/drawn", 0) > self.drawn:
            self.redone = int(last.get("ledger/redone", 0) + last["ledger/drawn"] - self.drawn)

    def state_dict(self) -> dict[str, int]:
        """All terms."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from terms that `state_dict` gave."""
        for name in asdict(self):
            setattr(self, name, int(state[name]))
