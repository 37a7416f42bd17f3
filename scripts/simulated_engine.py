"""What `simulate_fleet.py` makes up: how long responses are, and how an engine works through them."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# A decode step of a model of some billion weights on one GPU, and what each sequence adds. Only ratios matter here.
STEP_S, STEP_PER_SEQUENCE_S = 8e-3, 0.1e-3
EPOCHS = 4  # passes over the prompts, so that the length model sees each again


class SimulationError(Exception):
    """The simulation can't go on: a rule was broken, or no engine is left."""


@dataclass(frozen=True)
class Workload:
    """Response tokens of every request, group after group; group g is an answer to prompt `g % prompts`."""

    tokens: list[int]
    group_size: int
    prompts: int

    @property
    def groups(self) -> int:
        """Whole groups."""
        return len(self.tokens) // self.group_size


def log_normal(requests: int, group_size: int, median: float, sigma: float, limit: int, seed: int) -> Workload:
    """Log-normal lengths, half of whose variance is between prompts and half between answers to the same prompt."""
    rng = np.random.default_rng(seed)
    groups = math.ceil(requests / group_size)
    prompts = math.ceil(groups / EPOCHS)
    by_prompt = rng.normal(size=prompts)[np.arange(groups) % prompts]
    z = (by_prompt[:, None] + rng.normal(size=(groups, group_size))) / math.sqrt(2)
    tokens = np.clip(np.rint(median * np.exp(sigma * z)), 1, limit).astype(int)
    return Workload(tokens.ravel().tolist(), group_size, prompts)


def from_file(path: Path, requests: int, group_size: int, limit: int) -> Workload:
    """Lengths of a file, as often as needed; each `group_size` lines are the answers to one prompt."""
    lines = [min(limit, max(1, int(line))) for line in path.read_text().split()]
    prompts = len(lines) // group_size
    if not prompts:
        raise SimulationError(f"{path} has {len(lines)} lengths, and a group takes {group_size}")
    groups = math.ceil(requests / group_size)
    repeated = itertools.islice(itertools.cycle(lines[: prompts * group_size]), groups * group_size)
    return Workload(list(repeated), group_size, prompts)


@dataclass(slots=True)
class Engine:
    """Continuous batching: all running sequences get a token per decode step.

    `decoded` counts the tokens that a sequence running since the beginning would have by now; a sequence is done when
    the count reaches what it was when it came plus its length.
    """

    slots: int
    up: bool = True
    decoded: float = 0.0
    at: float = 0.0  # the simulated second up to which everything is counted
    running: dict[str, float] = field(default_factory=dict)  # id -> count at which it is done
    done_at: list[tuple[float, str]] = field(default_factory=list)
    plan: int = 0  # a planned finish with another number is outdated
    life: int = 0
    hanging: int = 0
    idle_s: float = 0.0
    up_s: float = 0.0
    tokens: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of a decode step at this load."""
        return STEP_S + STEP_PER_SEQUENCE_S * len(self.running)

    def advance(self, now: float) -> None:
        """Count what happened since the last time."""
        elapsed, self.at = now - self.at, now
        if not self.up:
            return
        self.up_s += elapsed
        if not self.running:
            self.idle_s += elapsed
            return
        steps = elapsed / self.token_s
        self.decoded += steps
        self.tokens += steps * (len(self.running) - self.hanging)

    def add(self, request_id: str, tokens: float) -> None:
        """Start a sequence; infinite `tokens` are one that hangs."""
        if not self.up or len(self.running) >= self.slots or request_id in self.running:
            raise SimulationError(f"request {request_id} was sent to an engine that is down, full, or has it already")
        self.running[request_id] = self.decoded + tokens
        self.hanging += math.isinf(tokens)
        heapq.heappush(self.done_at, (self.decoded + tokens, request_id))

    def drop(self, request_id: str) -> None:
        """Abort a sequence."""
        self.hanging -= math.isinf(self.running.pop(request_id))

    def next_done(self) -> float | None:
        """Seconds until the next sequence is done, if nothing changes."""
        while self.done_at and self.running.get(self.done_at[0][1]) != self.done_at[0][0]:
            heapq.heappop(self.done_at)
        if not self.done_at or math.isinf(self.done_at[0][0]):
            return None
        return max(0.0, self.done_at[0][0] - self.decoded) * self.token_s

    def take_done(self) -> list[str]:
        """Remove and return the sequences that are done."""
        done = []
        while self.next_done() is not None and self.done_at[0][0] <= self.decoded + 1e-6:
            done.append(heapq.heappop(self.done_at)[1])
            self.drop(done[-1])
        return done

    def crash(self) -> None:
        """The process ends with all that it had."""
        self.up, self.life = False, self.life + 1
        self.running.clear()
        self.hanging = 0
        self.done_at.clear()
