"""Simulate a large fleet of rollout engines, with the router, fleet health and length model that training uses.

    python scripts/simulate_fleet.py                                  # 1,024 engines, 1,000,000 requests
    python scripts/simulate_fleet.py --kill-rate 0 --hang-rate 0      # what over-generation does without failures
    python scripts/simulate_fleet.py --lengths lengths.txt            # your own lengths, one integer a line

Only engines and time are simulated. Generation goes in synchronous steps of --step-groups groups. An engine decodes one
token of each of its running sequences per decode step, and the more sequences run the longer that takes; prefill, the
update and the weight sync between steps take no time. Engines are killed at random, and start again after a while; some
requests are never answered and are found by their deadline.

The same requests are run without and with over-generation, where a step starts more groups than it needs, trains on
the first that are complete and gives up the rest. What comes out of it:

  lost               requests that were neither answered nor given up on purpose, and answers beyond one for a request;
                     more than 0 is an error of the router, and the exit code is 1
  idle               share of the time in which an engine is up and has nothing to do
  tail               seconds of a step from 90 % of the groups that it needs to all of them
  mean length        of the samples trained on; over-generation favours short answers, and this is by how much
  refill             wall time of one routing decision on this machine: an answer is taken, and its slot given to
                     another request; on a busy machine the median is what to go by

The last line is a JSON object with all figures.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from simulated_engine import STEP_PER_SEQUENCE_S, STEP_S, Engine, SimulationError, Workload, from_file, log_normal

from rlhf.rollout.health import FleetHealth
from rlhf.rollout.lengths import LengthModel
from rlhf.rollout.router import Assignment, Router

PROMPT_TOKENS = 200
PROBE_S, RESTART_S, SYNC_S = 10.0, 60.0, 5.0
ATTEMPTS, MAX_RESTARTS = 5, 20
CHECKS_PER_DEADLINE = 10
REFILLS = 20_000  # decisions that are timed for each size of fleet
WAITING, ANSWERED, WITHDRAWN, FAILED = range(4)


@dataclass(frozen=True)
class Result:
    """What a run came to; times are simulated seconds, refills wall microseconds, None where nothing ever waited."""

    requests: int
    answered: int
    withdrawn: int
    failed: int
    lost: int
    twice: int
    trained: int
    retried: int
    deaths: int
    steps: int
    seconds: float
    trained_tokens_per_s: float
    decoded_tokens_per_s: float
    idle: float
    tail_mean_s: float
    tail_max_s: float
    mean_length: float
    refill_mean_us: float | None
    refill_p99_us: float | None


class Simulation:
    """One run of a workload; `run` returns what it came to."""

    def __init__(self, workload: Workload, options: argparse.Namespace, over_generation: float) -> None:
        self._work, self._options, self._over_generation = workload, options, over_generation
        self.now = 0.0
        self._random = random.Random(options.seed)
        self._router = Router(
            slots=options.slots, attempts=ATTEMPTS, deadline_s=options.deadline_s, clock=lambda: self.now
        )
        self._health = FleetHealth(options.engines, max_restarts=MAX_RESTARTS)
        self._lengths = LengthModel()
        self._engines = [Engine(options.slots) for _ in range(options.engines)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        requests = workload.groups * workload.group_size
        self._fate = bytearray(requests)
        self._answers = bytearray(requests)
        self._unsettled: dict[int, int] = {}  # group -> requests without a fate, of the step's incomplete groups
        self._complete: list[tuple[int, float]] = []  # groups of the step, and when
        self._needed = 0
        self._trained: list[int] = []
        self._tails: list[float] = []
        self._refills: list[float] = []
        self._retried, self._deaths = 0, 0

    def run(self) -> Result:
        """Step after step until the workload is used up."""
        for index in range(len(self._engines)):
            self._schedule_kill(index)
        self._schedule(self._options.deadline_s / CHECKS_PER_DEADLINE, self._check_deadlines)
        per_step = math.ceil(self._options.step_groups * (1 + self._over_generation))
        for first in range(0, self._work.groups, per_step):
            self._step(range(first, min(first + per_step, self._work.groups)))
        return self._result()

    # --- a step ---

    def _step(self, groups: range) -> None:
        self._needed = math.ceil(len(groups) / (1 + self._over_generation))
        self._complete = []
        size = self._work.group_size
        for index in self._health.alive():
            self._health.sync_begun(index)
            self._commit(index, self._engines[index].life)
        for group in groups:
            self._unsettled[group] = size
            prompt = str(group % self._work.prompts)
            expected = self._lengths.expect(prompt, self._options.limit)
            for request in range(group * size, (group + 1) * size):
                self._router.submit(str(request), group=group, prompt_tokens=PROMPT_TOKENS, expected_tokens=expected)
        self._start(self._router.dispatch())
        while len(self._complete) < self._needed and (self._router.waiting or self._router.outstanding()):
            self.now, _, handler, arguments = heapq.heappop(self._events)
            handler(*arguments)
        self._end_step()

    def _end_step(self) -> None:
        """Give up what is not needed any more, and count what was."""
        size = self._work.group_size
        for group in self._unsettled:
            for request in range(group * size, (group + 1) * size):
                if self._fate[request] == WAITING:
                    self._withdraw(request)
        self._unsettled.clear()
        trained = self._complete[: self._needed]
        for group, _ in trained:
            members = range(group * size, (group + 1) * size)
            self._trained += [self._work.tokens[r] for r in members if self._fate[r] == ANSWERED]
        if trained:
            self._tails.append(trained[-1][1] - trained[math.ceil(0.9 * len(trained)) - 1][1])
        for index, engine in enumerate(self._engines):
            engine.advance(self.now)
            self._plan(index)

    def _withdraw(self, request: int) -> None:
        """Give up a request. One that the router has no more has been lost, and stays without a fate."""
        before = self._router.waiting + self._router.outstanding()
        engine = self._router.withdraw(str(request))
        if self._router.waiting + self._router.outstanding() < before:
            self._fate[request] = WITHDRAWN
        if engine is not None:
            self._engines[engine].advance(self.now)
            self._engines[engine].drop(str(request))

    # --- events ---

    def _schedule(self, delay: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + delay, self._scheduled, handler, arguments))

    def _schedule_kill(self, index: int) -> None:
        if self._options.kill_rate:
            delay = self._random.expovariate(self._options.kill_rate / 3600)
            self._schedule(delay, self._killed, index, self._engines[index].life)

    def _plan(self, index: int) -> None:
        """Plan the engine's next finish anew; its load has changed."""
        engine = self._engines[index]
        engine.plan += 1
        if (delay := engine.next_done()) is not None:
            self._schedule(delay, self._finished, index, engine.plan)

    def _start(self, assignments: Sequence[Assignment]) -> None:
        changed = dict.fromkeys(assignment.engine for assignment in assignments)
        for index in changed:
            self._engines[index].advance(self.now)
        for assignment in assignments:
            hangs = self._options.hang_rate and self._random.random() < self._options.hang_rate
            tokens = math.inf if hangs else self._work.tokens[int(assignment.request_id)]
            self._engines[assignment.engine].add(assignment.request_id, tokens)
        for index in changed:
            self._plan(index)

    def _finished(self, index: int, plan: int) -> None:
        engine = self._engines[index]
        if engine.plan != plan:
            return
        engine.advance(self.now)
        done = engine.take_done()
        for request_id in done:
            self._answers[int(request_id)] += 1
        done = [request_id for request_id in done if self._answers[int(request_id)] == 1]
        began = time.perf_counter()
        for request_id in done:
            self._router.finish(request_id)
        assignments = self._router.dispatch()
        took = time.perf_counter() - began
        if assignments:
            self._refills.append(took / len(assignments))
        for request_id in done:
            self._health.request_ok(index)
            self._settle(int(request_id), ANSWERED)
        self._start(assignments)
        if all(assignment.engine != index for assignment in assignments):
            self._plan(index)

    def _settle(self, request: int, fate: int) -> None:
        self._fate[request] = fate
        group = request // self._work.group_size
        if fate == ANSWERED:
            self._lengths.observe(str(group % self._work.prompts), self._work.tokens[request])
        self._unsettled[group] -= 1
        if not self._unsettled[group]:
            del self._unsettled[group]
            self._complete.append((group, self.now))

    # --- failures ---

    def _killed(self, index: int, life: int) -> None:
        """The engine dies, or is ended; a new process is there after a while."""
        engine = self._engines[index]
        if engine.life != life:
            return
        engine.advance(self.now)
        engine.crash()
        engine.plan += 1
        self._deaths += 1
        self._health.died(index)
        lost = self._router.lose(index)
        self._retried += len(lost.retried)
        for request_id in lost.exhausted:
            self._settle(int(request_id), FAILED)
        if self._health.restart(index) == "restarting":
            self._schedule(RESTART_S, self._started, index)
        elif self._health.hopeless:
            raise SimulationError(f"no engine is left: each of {len(self._engines)} was restarted {MAX_RESTARTS} times")
        self._start(self._router.dispatch())

    def _started(self, index: int) -> None:
        engine = self._engines[index]
        engine.advance(self.now)
        engine.up = True
        self._health.started(index)
        self._schedule_kill(index)
        self._schedule(SYNC_S, self._commit, index, engine.life)

    def _commit(self, index: int, life: int) -> None:
        """The engine has the weights, alone after its start or with all others at a step's begin."""
        if self._engines[index].life == life:
            self._health.committed(index)
            self._router.open(index)
            self._start(self._router.dispatch())

    def _check_deadlines(self) -> None:
        """Requests that were not answered in time go elsewhere, and their engine is not trusted until it is probed."""
        for late in self._router.overdue():
            engine = self._engines[late.engine]
            if late.request_id not in engine.running:
                continue  # its engine was given up for another one, just now
            engine.advance(self.now)
            engine.drop(late.request_id)
            if self._router.retry(late.request_id):
                self._retried += 1
            else:
                self._settle(int(late.request_id), FAILED)
            state = self._health.request_failed(late.engine)
            if state == "suspect":
                self._router.close(late.engine)
                self._schedule(PROBE_S, self._probe, late.engine, engine.life)
            if state == "dead":
                self._killed(late.engine, engine.life)
            else:
                self._plan(late.engine)
        self._start(self._router.dispatch())
        self._schedule(self._options.deadline_s / CHECKS_PER_DEADLINE, self._check_deadlines)

    def _probe(self, index: int, life: int) -> None:
        if self._engines[index].life == life and self._health.probe_ok(index) == "healthy":
            self._router.open(index)
            self._start(self._router.dispatch())

    # --- what it came to ---

    def _result(self) -> Result:
        if not self._trained:
            raise SimulationError("no group was completed")
        fates = [self._fate.count(fate) for fate in range(4)]
        trained_tokens = sum(self._trained)
        refills = sorted(self._refills)
        return Result(
            requests=len(self._fate),
            answered=fates[ANSWERED],
            withdrawn=fates[WITHDRAWN],
            failed=fates[FAILED],
            lost=fates[WAITING],
            twice=sum(count > 1 for count in self._answers),
            trained=len(self._trained),
            retried=self._retried,
            deaths=self._deaths,
            steps=len(self._tails),
            seconds=self.now,
            trained_tokens_per_s=trained_tokens / self.now,
            decoded_tokens_per_s=sum(engine.tokens for engine in self._engines) / self.now,
            idle=sum(engine.idle_s for engine in self._engines) / sum(engine.up_s for engine in self._engines),
            tail_mean_s=statistics.fmean(self._tails),
            tail_max_s=max(self._tails),
            mean_length=trained_tokens / len(self._trained),
            refill_mean_us=statistics.fmean(refills) * 1e6 if refills else None,
            refill_p99_us=percentile(refills, 0.99) * 1e6 if refills else None,
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values doesn't exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def refill_cost(engines: int, slots: int, group_size: int, seed: int) -> dict[str, float]:
    """Microseconds of wall time to take an answer and to refill its slot, on a full fleet with a queue."""
    router = Router(slots=slots, attempts=ATTEMPTS, deadline_s=math.inf, clock=time.monotonic)
    work = log_normal(engines * slots + REFILLS, group_size, median=600, sigma=0.8, limit=4096, seed=seed)
    for index, tokens in enumerate(work.tokens):
        router.submit(str(index), group=index // group_size, prompt_tokens=PROMPT_TOKENS, expected_tokens=tokens)
    for engine in range(engines):
        router.open(engine)
    running = [assignment.request_id for assignment in router.dispatch()]
    rng = random.Random(seed)
    gc.collect()  # what fleets before this one left behind is none of its cost
    costs = []
    for _ in range(REFILLS):
        slot = rng.randrange(len(running))
        began = time.perf_counter()
        router.finish(running[slot])
        (assignment,) = router.dispatch()
        costs.append(time.perf_counter() - began)
        running[slot] = assignment.request_id
    costs.sort()
    return {
        "mean_us": statistics.fmean(costs) * 1e6,
        "median_us": percentile(costs, 0.5) * 1e6,
        "p99_us": percentile(costs, 0.99) * 1e6,
    }


def growth(costs: dict[int, dict[str, float]]) -> float:
    """How the median cost grew from the smallest to the largest fleet, over how the logarithm of the size did.

    The median, since a few pauses of a busy machine move the mean of a small fleet more than its size does.
    """
    small, large = min(costs), max(costs)
    return (costs[large]["median_us"] / costs[small]["median_us"]) / (math.log(large) / math.log(small))


def show(runs: dict[str, Result], costs: dict[int, dict[str, float]]) -> None:
    """Print the tables for people."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    rows: list[tuple[str, str, Callable[[Result], float | None]]] = [
        ("requests", ",.0f", lambda r: r.requests),
        ("  answered", ",.0f", lambda r: r.answered),
        ("  given up by over-generation", ",.0f", lambda r: r.withdrawn),
        ("  failed, all attempts used up", ",.0f", lambda r: r.failed),
        ("  lost, or answered twice", ",.0f", lambda r: r.lost + r.twice),
        ("samples trained on", ",.0f", lambda r: r.trained),
        ("sent again", ",.0f", lambda r: r.retried),
        ("deaths of engines", ",.0f", lambda r: r.deaths),
        ("steps", ",.0f", lambda r: r.steps),
        ("seconds, simulated", ",.0f", lambda r: r.seconds),
        ("tokens/s, of trained samples", ",.0f", lambda r: r.trained_tokens_per_s),
        ("tokens/s, decoded", ",.0f", lambda r: r.decoded_tokens_per_s),
        ("idle, of the time up", ".1%", lambda r: r.idle),
        ("tail of a step in s, mean", ".1f", lambda r: r.tail_mean_s),
        ("tail of a step in s, longest", ".1f", lambda r: r.tail_max_s),
        ("mean length of trained samples", ".1f", lambda r: r.mean_length),
        ("refill in us of wall time, mean", ".1f", lambda r: r.refill_mean_us),
        ("refill in us of wall time, p99", ".1f", lambda r: r.refill_p99_us),
    ]
    table = Table("", *runs)
    for name, form, value in rows:
        values = [value(result) for result in runs.values()]
        table.add_row(name, *("" if number is None else format(number, form) for number in values))
    console.print(table)
    table = Table("engines, all full and requests waiting", *(f"{engines:,}" for engines in costs))
    for name, key in (("refill in us of wall time, mean", "mean_us"), ("median", "median_us"), ("p99", "p99_us")):
        table.add_row(name, *(f"{cost[key]:.1f}" for cost in costs.values()))
    console.print(table)
    console.print(
        f"Growth of the median over growth of the logarithm of the engines: {growth(costs):.2f} (at most 1 wanted)"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program with what is wrong about them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"{text} (%(default)s)", **more)

    option("engines", 1024, "engines of the fleet")
    option("slots", 32, "sequences that an engine runs together")
    option("requests", 1_000_000, "requests to simulate, rounded up to whole groups")
    option("group-size", 8, "samples of a prompt")
    option("step-groups", 8192, "groups that a step trains on")
    option("over-generation", 0.25, "groups started beyond these, as a share; 0 leaves out the second run")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="response tokens, one integer a line")
    option("median", 600.0, "median of log-normal lengths, in tokens")
    option("sigma", 0.8, "standard deviation of their logarithm")
    option("limit", 4096, "the longest response")
    option("kill-rate", 0.5, "deaths per engine and hour")
    option("hang-rate", 1e-5, "share of requests sent that are never answered")
    option("deadline-s", 120.0, "seconds that a request may take; more than the longest one needs")
    option("seed", 0, "of lengths and failures")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096], help="fleets to time refills with"
    )
    options = parser.parse_args(argv)
    longest = options.limit * (STEP_S + STEP_PER_SEQUENCE_S * options.slots)
    if options.deadline_s <= longest:
        parser.error(
            f"--deadline-s {options.deadline_s:g}: the longest response takes {longest:.0f} s on a full engine"
        )
    if min(options.sizes) < 2 or len(options.sizes) < 2:
        parser.error("--sizes: at least two fleets of at least two engines")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulations and print what came out; 1 when a request was lost or answered twice."""
    options = parse(argv)
    try:
        if options.lengths:
            work = from_file(options.lengths, options.requests, options.group_size, options.limit)
        else:
            work = log_normal(
                options.requests, options.group_size, options.median, options.sigma, options.limit, options.seed
            )
        shares = dict.fromkeys([0.0, options.over_generation])
        runs = {f"over-generation {share:g}": Simulation(work, options, share).run() for share in shares}
    except SimulationError as error:
        print(f"simulate_fleet: {error}", file=sys.stderr)
        return 1
    costs = {size: refill_cost(size, options.slots, options.group_size, options.seed) for size in options.sizes}
    show(runs, costs)
    figures = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "runs": [{"over_generation": share, **asdict(run)} for share, run in zip(shares, runs.values(), strict=True)],
        "refill": [{"engines": engines, **cost} for engines, cost in costs.items()],
        "refill_growth": growth(costs),
    }
    print(json.dumps(figures), flush=True)
    return int(any(run.lost or run.twice for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
