"""How long planning a batch takes, and how evenly the ranks come out of it.

    python scripts/benchmarks/planner.py

4,096 samples on 512 ranks, packed rows of at most 8,192 tokens: log-normal response lengths, for groups of 1 and of 8
samples. `seconds` is the time of one plan, in seconds of CPU and in a single thread, the median of `--repeats` plans of
the same batch. `spread` is the highest cost of a rank less the lowest, over the mean; `above_mean` is the highest less
the mean. Both are of the batch that comes out worst of `--seeds`. Costs are those of the model's shape, each prompt
once in a micro-batch, computed here from the plan alone.

No plan makes the highest rank cheaper than the most expensive sample with its prompt: `floor` is how far that sample is
above the mean of the ranks. Where it is above 0 the lengths leave no even plan, whatever planned them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import MODEL, finish, log_normal, machine, markdown, say_machine, show

from rlhf.batching import CostModel, Plan, SampleLength, plan_packed
from rlhf.cluster.model_shape import ModelShape

WANTED_SECONDS, WANTED_SPREAD = 0.2, 0.02


@dataclass(frozen=True)
class Batch:
    """A kind of batch: groups of so many samples, and their lengths in tokens."""

    group: int
    prompt: int
    response: int
    sigma: float

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.group} a prompt, {self.prompt} + {self.response:,} tokens, sigma {self.sigma:g}"


@dataclass(frozen=True)
class Outcome:
    """What came of planning a kind of batch; costs are relative to the mean over the ranks."""

    seconds: float
    spread: float
    above_mean: float
    floor: float


def lengths(batch: Batch, samples: int, longest: int, seed: int) -> list[SampleLength]:
    """Samples of log-normal responses with the batch's mean, of at least one token and at most `longest`."""
    drawn = log_normal(batch.response, batch.sigma, samples, seed).clip(1, longest).astype(int).tolist()
    return [
        SampleLength(f"{index}", index // batch.group, batch.prompt + tokens, batch.prompt)
        for index, tokens in enumerate(drawn)
    ]


def rank_costs(plan: Plan, cost: CostModel) -> list[float]:
    """What each rank computes in a plan of one minibatch."""
    (minibatch,) = plan.minibatches
    return [sum(cost.total(micro_batch.samples) for micro_batch in rank) for rank in minibatch.ranks]


def outcome(costs: Sequence[float], seconds: float, largest: float) -> Outcome:
    """Figures of one plan; `largest` is the cost of its most expensive sample with its prompt."""
    mean = statistics.fmean(costs)
    spread, above = (max(costs) - min(costs)) / mean, max(costs) / mean - 1
    return Outcome(seconds, spread, above, max(0.0, largest / mean - 1))


def measure(batch: Batch, arguments: argparse.Namespace, cost: CostModel) -> list[Outcome]:
    """Plan a batch of each seed, several times."""
    found = []
    for seed in range(arguments.seeds):
        samples = lengths(batch, arguments.samples, arguments.longest, seed)
        seconds = []
        for _ in range(arguments.repeats):
            started = time.process_time()
            plan = plan_packed(samples, arguments.ranks, 1, arguments.max_tokens, cost)
            seconds.append(time.process_time() - started)
        largest = max(cost.prompt(sample) + cost.response(sample) for sample in samples)
        found.append(outcome(rank_costs(plan, cost), statistics.median(seconds), largest))
    return found


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The largest of each figure, the median of the seconds."""
    spread, above, floor = (max(getattr(o, name) for o in outcomes) for name in ("spread", "above_mean", "floor"))
    return Outcome(statistics.median(o.seconds for o in outcomes), spread, above, floor)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="whose shape the costs are of")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8192, help="cap on a micro-batch")
    parser.add_argument("--longest", type=int, default=8192, help="responses are cut here")
    parser.add_argument("--prompts", nargs="+", type=int, default=[50, 200], help="tokens of a prompt")
    parser.add_argument("--responses", nargs="+", type=int, default=[300, 1000], help="mean tokens of a response")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 8], help="samples of a group")
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.6, 1.0], help="of the log-normal lengths")
    parser.add_argument("--seeds", type=int, default=3, help="batches of each kind")
    parser.add_argument("--repeats", type=int, default=5, help="plans of each batch")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    arguments = parse(argv)
    where = machine()
    say_machine(where)
    shape = ModelShape.from_path(arguments.model)
    cost = CostModel.of_decoder(
        shape.parameters - shape.embedding_parameters, shape.layers, shape.heads, shape.head_dim
    )
    kinds = [
        Batch(group, prompt, response, sigma)
        for group in arguments.groups
        for prompt in arguments.prompts
        for response in arguments.responses
        for sigma in arguments.sigmas
    ]
    found = {kind: worst(measure(kind, arguments, cost)) for kind in kinds}
    title = f"Planning {arguments.samples:,} samples on {arguments.ranks} ranks, the worst of {arguments.seeds} batches"
    header = ["batch", "seconds of CPU", "spread", "highest above mean", "longest sample above mean"]
    rows = [
        [kind.name, f"{o.seconds:.3f}", f"{o.spread:.1%}", f"{o.above_mean:.1%}", f"{o.floor:.1%}"]
        for kind, o in found.items()
    ]
    show(title, header, rows)
    finish(figures(arguments, found) | {"machine": where}, [markdown(header, rows)])
    return 0


def figures(arguments: argparse.Namespace, found: dict[Batch, Outcome]) -> dict[str, Any]:
    """The JSON object: the worst of all batches, and of those in which an even plan exists."""
    even = [o for o in found.values() if o.floor == 0.0]
    return {
        "benchmark": "planner",
        "seconds": max(o.seconds for o in found.values()),
        "spread": max(o.spread for o in found.values()),
        "spread_where_even_is_possible": max((o.spread for o in even), default=None),
        "wanted": {"seconds": WANTED_SECONDS, "spread": WANTED_SPREAD},
        "batches": [asdict(kind) | asdict(o) for kind, o in found.items()],
        **vars(arguments),
        "model": arguments.model.name,
    }


if __name__ == "__main__":
    sys.exit(main())
