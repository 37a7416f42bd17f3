"""The whole driver on the tiny model, one run after the other on the same actors.

Only what is slow to start is shared: Ray, the engine, and the processes of policy, critic and reward. Each run has its
own configuration, and its learners load their models and make their optimizers again, so it starts where all start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlhf.algorithms.catalogue import needs_critic
from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.model_shape import ModelShapes
from rlhf.cluster.session import Session, open_session
from rlhf.cluster.wait import set_explainer
from rlhf.config import Config, config_from_dict
from rlhf.learners.learner import Learner
from rlhf.rollout.fleet import Fleet
from rlhf.trainers.checkpointing import Checkpointer, open_store
from rlhf.trainers.checks import open_journal
from rlhf.trainers.ppo import _Run
from rlhf.trainers.prompts import RunPrompts
from rlhf.trainers.roles import Roles, start_roles

log = logging.getLogger(__name__)

Sections = Mapping[str, Mapping[str, Any]]
Metrics = list[dict[str, Any]]

STEPS, PROMPTS, SAMPLES = 8, 8, 8
CALL_S = 120.0
DIGITS = f"{Path(__file__).parents[1] / 'e2e' / 'rewards.py'}:digits"
# With two updates a batch the ratio leaves 1 in the second, so that a trust region has something to hold back.
LEARNER = {"learning_rate": 2e-3, "minibatches": 2}


def learning_config(model: Path, runs: Path, name: str, changes: Sections, seed: int) -> Config:
    """A run on prompts like "3+4=", with responses of at most 6 characters; the reward is their share of digits.

    Deterministic, so that a curve is the same whenever it is made on one machine. `changes` go into the sections.
    """
    runs.mkdir(parents=True, exist_ok=True)
    prompts = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(10) for b in range(10)]
    (runs / "prompts.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(runs), "steps": STEPS, "seed": seed, "deterministic": True},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "prompts": {"source": "jsonl", "path": str(runs / "prompts.jsonl")},
            "chat_template": False,
            "max_prompt_tokens": 8,
        },
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 6,
            "kv_cache_bytes": 1 << 26,
            "deadline_s": CALL_S,
        },
        "policy": LEARNER,
        "reward": {"functions": [{"name": DIGITS}]},
        "placement": {"device": "cpu"},
        "tracking": {"console": False},
    }
    if changes["algorithm"]["advantage"] == "gae":
        sections["critic"] = LEARNER
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return config_from_dict(sections)


class Driver:
    """Runs the driver's loop on roles that are there already."""

    def __init__(self, model: Path, runs: Path, runner: asyncio.Runner, session: Session) -> None:
        self._model = model
        self._runs = runs
        self._runner = runner
        self._session = session
        self._groups: dict[str, ActorGroup] = {group.role: group for group in session._groups}

    @staticmethod
    @contextmanager
    def start(model: Path, runs: Path) -> Iterator[Driver]:
        """Start all roles that any of the runs needs, a critic among them."""
        config = learning_config(model, runs, "start", {"algorithm": {"advantage": "gae"}}, seed=1)
        stack = AsyncExitStack()

        async def start(runner: asyncio.Runner) -> Driver:
            session = await stack.enter_async_context(open_session(config, ModelShapes.of(config)))
            journal = stack.enter_context(open_journal(config))
            roles = await stack.enter_async_context(start_roles(config, session, journal.folder, {}, {}, journal.note))
            await part(roles.fleet)
            return Driver(model, runs, runner, session)

        with asyncio.Runner() as runner:
            try:
                yield runner.run(start(runner))
            finally:
                runner.run(stack.aclose())
                # Opening the session set one that asks its supervisor.
                set_explainer(lambda error, what: error)

    def train(self, name: str, changes: Sections, *, seed: int = 1) -> Metrics:
        """The metrics of every step of a run from the first weights on."""
        return self._runner.run(self._train(learning_config(self._model, self._runs, name, changes, seed)))

    async def _train(self, config: Config) -> Metrics:
        groups = {role: group for role, group in self._groups.items() if role != "critic" or needs_critic(config)}
        for role in groups.keys() & {"policy", "critic"}:
            await groups[role].call("__ray_call__", start_again, config, what=f"a fresh {role}", deadline_s=CALL_S)
        roles = Roles(config, self._session, groups, 0, log.warning)
        checkpoints = Checkpointer(config, open_store(config), roles, log.warning)
        roles.fleet._workers = {0: 1}
        await roles.fleet.join()
        try:
            with open_journal(config) as journal:
                run = _Run(config, RunPrompts.load(config), journal, roles, checkpoints)
                await roles.guard(run.train(None))
        finally:
            await part(roles.fleet)
        return [json.loads(line) for line in journal.folder.metrics_jsonl.read_text(encoding="utf-8").splitlines()]


async def part(fleet: Fleet) -> None:
    """Let a fleet's engines go to the next one: they serve nobody, and are in no transfer group."""
    await fleet.close()
    for engine in fleet.engines:
        await fleet._group.call_rank(engine, "begin_sync", "drain", what="the end of a run", deadline_s=CALL_S)
    await fleet._weights.remove(fleet.engines)


def start_again(learner: Learner, config: Config) -> None:
    """In a learner's process: load the model and make the optimizer again, as the configuration of a new run says.

    The process stays in its process group; a policy that has been in a transfer group leaves it.
    """
    sender: Any = getattr(learner, "_sender", None)
    if sender is not None:
        for epoch in list(sender._epochs):
            sender.leave(epoch)
        learner._sender = None  # type: ignore[attr-defined]
    learner._config, learner._version = config, 0
    learner.setup(("", 0))  # no address: there is a process group already
