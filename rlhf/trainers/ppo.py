"""The driver of every online algorithm (`task: ppo`).

A step takes groups of prompts from the sampler, generates, scores each group as soon as it is finished, trains, and
brings the new weights to the engines. The driver reads headers only; token arrays go from actor to actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.algorithms.controller import KLController
from rlhf.checkpoint import Checkpoint
from rlhf.cluster.model_shape import ModelShapes
from rlhf.cluster.session import open_session
from rlhf.cluster.wait import first_failure
from rlhf.config.schema import Config
from rlhf.rollout.types import Sampling
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.metrics import reward_metrics, rollout_metrics
from rlhf.tracking.spans import recorder, span
from rlhf.trainers.batch import TrainingBatch, assemble
from rlhf.trainers.checkpointing import (
    Checkpointer,
    check_initial_weights,
    choose_checkpoint,
    is_finished,
    open_store,
)
from rlhf.trainers.checks import (
    check_algorithms,
    check_configuration,
    check_device,
    check_rewards,
    check_run_folder,
    open_journal,
)
from rlhf.trainers.collect import Collected, Collector
from rlhf.trainers.evaluation import Evaluator
from rlhf.trainers.journal import Journal
from rlhf.trainers.parity import Parity, compare_logprobs
from rlhf.trainers.prompts import RunPrompts
from rlhf.trainers.recovery import Progress, Recovery
from rlhf.trainers.roles import Roles, start_roles
from rlhf.trainers.versions import check_versions
from rlhf.trajectories import Ledger

if TYPE_CHECKING:
    from rlhf.rewards.types import RewardFunction

log = logging.getLogger(__name__)

_PROBE_PROMPTS = 4
_PROBE_TOKENS = 16


class NothingToTrainOn(RuntimeError):
    """No sample of a step was left after failed rewards and filtering."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished run leaves: its folder, and the metrics of its last step."""

    folder: Path
    steps: int
    metrics: Mapping[str, float]


class PPOTrainer:
    """Trains a policy as the configuration says; `fit()` runs from start to end.

    `reward_functions` are used besides `reward.functions`, each with weight 1, under the names given here.
    Raises `rlhf.cluster.preflight.Refused` when the run can't start here, before any actor does.
    """

    def __init__(self, config: Config, reward_functions: Mapping[str, RewardFunction] | None = None) -> None:
        self._config = config
        self._reward_functions = dict(reward_functions or {})

    def fit(self) -> RunSummary:
        """Run all steps; returns when the export is written and every process of the run has ended."""
        return asyncio.run(self.fit_async())

    async def fit_async(self) -> RunSummary:
        """`fit` for a program that has an event loop already, such as a notebook: `await trainer.fit_async()`."""
        config = self._config
        # All that can refuse the run comes first, and leaves nothing behind: no actor, no folder.
        check_versions()
        # Before the rules: only then it is known what functions of the user's own ask for.
        own = check_algorithms(config)
        check_configuration(config)
        check_run_folder(config.run)
        prompts = RunPrompts.load(config)
        extra = check_rewards(config, self._reward_functions)
        notes: list[str] = []
        store = open_store(config)
        check_initial_weights(config)
        checkpoint = choose_checkpoint(config, store, notes.append)
        export = RunFolder.place(config.run).export
        if is_finished(config, checkpoint, export):
            log.warning("the run is finished already: its last step is saved, and its model is in %s", export)
            return RunSummary(export.parent, config.run.steps, {})
        async with open_session(config, ModelShapes.of(config), say=notes.append) as session:
            check_device(config, session.needs.device)
            # The session closes inside the journal too: trackers may take their time once no process is left.
            with open_journal(config) as journal, contextlib.closing(session):
                store.clean()
                for note in [*notes, *prompts.notes()]:
                    journal.note(note)
                recovery = Recovery(config, prompts.train, store, journal.note)

                async def attempt(begin: Checkpoint | None) -> RunSummary:
                    async with start_roles(config, session, journal.folder, extra, own, journal.note) as roles:
                        checkpoints = Checkpointer(config, store, roles, journal.note)
                        try:
                            return await roles.guard(_Run(config, prompts, journal, roles, checkpoints).train(begin))
                        finally:
                            await checkpoints.close()

                return await recovery.run(attempt, session.end_actors, checkpoint)


class _Run:
    """The state of one run, and its loop."""

    def __init__(
        self, config: Config, prompts: RunPrompts, journal: Journal, roles: Roles, checkpoints: Checkpointer
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._journal = journal
        self._roles = roles
        self._sampling = Sampling.for_training(config)
        self._ledger = Ledger()
        self._collector = Collector(config, roles, prompts.train, self._ledger)
        self._evaluator = Evaluator(config, prompts, roles)
        self._kl = KLController(config.algorithm.kl)
        self._progress = Progress()
        self._checkpoints = checkpoints
        for name, stateful in (
            ("prompts", prompts.train),
            ("collector", self._collector),
            ("ledger", self._ledger),
            ("kl", self._kl),
            ("lengths", roles.pool.lengths),
            ("fleet", roles.fleet),
            ("progress", self._progress),
        ):
            checkpoints.registry.register(name, stateful)

    async def train(self, begin: Checkpoint | None) -> RunSummary:
        """Restore or start afresh, sync and probe, train all steps, export."""
        done = await self._begin(begin)
        metrics: dict[str, float] = {}
        for step in range(done + 1, self._config.run.steps + 1):
            with span("step", step):
                metrics = await self._step(step)
            spans = recorder.drain()
            self._progress.moved += metrics["policy/grad_norm"] > 0
            evaluated = await self._evaluate(step)
            saved = await self._checkpoints.snapshot(step, {**metrics, **evaluated})
            self._journal.step(step, {**metrics, **saved}, spans)
            await self._write_spans()
            self._journal.sync()
            self._checkpoints.write_behind()
        await self._checkpoints.finish()
        self._collector.finish()
        self._ledger.check()
        if self._progress.moved == 0:
            self._journal.note(
                "warning: no step changed the model, the export equals what the run started from: every advantage was 0"
            )
        await self._roles.export(self._journal.folder.export)
        return RunSummary(self._journal.folder.path, self._config.run.steps, metrics)

    async def _begin(self, begin: Checkpoint | None) -> int:
        """Bring everything to where the run goes on, and the weights to the engines; returns the step that is done.

        A run from its start is evaluated before its first step, and its critic is given a head start.
        """
        last = self._journal.rewind(None if begin is None else begin.step)
        self._checkpoints.rewind(begin)
        if begin is not None:
            await self._checkpoints.restore(begin)
            self._journal.note(f"goes on after step {begin.step}, from {begin.path}")
        self._ledger.rewound(last)
        step = 0 if begin is None else begin.step
        await self._roles.sync(version=step)
        parity = await self._probe()
        self._journal.note(f"parity probe: {parity.max_abs:.2g} nats at most over {parity.tokens} tokens")
        if begin is None:
            await self._evaluate(step)
            for number in range(1, self._config.critic.warmup_batches + 1):
                await self._warm_up_critic(number)
        await self._write_spans()
        return step

    async def _step(self, step: int) -> dict[str, float]:
        batch = await self._experience(step)
        samples = [entry.sample for entry in batch.samples]
        with span("update", step):
            async with first_failure() as writing:
                writing.create_task(self._roles.record(step, batch.groups))
                learned = await self._roles.update(step, samples, self._kl.coefficient)
            self._ledger.settle("trained", len(samples))
        with span("sync", step):
            synced = await self._roles.sync(version=step)
        with span("account", step):
            self._ledger.check()
            recorder.absorb(await self._roles.drain_spans(), step)
            metrics = {**batch.metrics(), **reward_metrics(batch.trajectories), **learned}
            if "policy/kl" in learned:
                metrics["policy/kl_coefficient"] = self._kl.coefficient
                self._kl.update(learned["policy/kl"], len(samples))
            return {**metrics, **synced.metrics(), **self._roles.fleet.metrics(), **self._ledger.metrics()}

    async def _experience(self, step: int) -> TrainingBatch:
        """Generate, score and estimate a batch with the weights of the step before."""
        collected = await self._collector.collect(step)
        with span("assemble", step):
            batch = self._assemble(step, collected)
        with span("estimate", step):
            samples = await self._roles.predict([entry.sample for entry in batch.samples])
            rewarded = [replace(entry, sample=s) for entry, s in zip(batch.samples, samples, strict=True)]
            batch = batch.estimated(*await self._roles.estimate(rewarded, self._kl.coefficient))
        return batch.with_figures({**rollout_metrics(batch.trajectories, collected.seconds), **collected.figures})

    def _assemble(self, step: int, collected: Collected) -> TrainingBatch:
        """What can be trained on; the other samples leave the ledger here."""
        batch = assemble(collected.scored, self._config, weight_version=max(0, step - 1), greedy=collected.greedy)
        self._ledger.settle("failed", batch.failed)
        self._ledger.settle("filtered", batch.filtered)
        if not batch.samples:
            raise NothingToTrainOn(
                f"step {step}: no sample is left to train on ({batch.failed} failed rewards, {batch.filtered} filtered "
                f"because their group had too few left). {batch.first_error or ''}".rstrip()
            )
        return batch

    async def _warm_up_critic(self, number: int) -> None:
        """Train the critic alone on a batch of the policy that the run starts with; the batch is discarded after it."""
        with span("critic_warmup"):
            batch = await self._experience(step=0)
            learned = await self._roles.update_critic(number, [entry.sample for entry in batch.samples])
        self._ledger.settle("discarded", len(batch.samples))
        self._ledger.check()
        explained = learned.get("critic/explained_variance")
        self._journal.note(
            f"critic warm-up {number}/{self._config.critic.warmup_batches}: loss {learned['critic/loss']:.4g}"
            + ("" if explained is None else f", explained variance {explained:.3f}")
        )

    async def _probe(self) -> Parity:
        """Compare engine and trainer on a few prompts of the run; raises `ParityError` beyond the dtype's bounds."""
        with span("parity_probe"):
            draws = self._prompts.peek(_PROBE_PROMPTS)
            sampling = self._sampling.limited_to(_PROBE_TOKENS)
            stream = self._roles.pool.stream(draws, 1, sampling, purpose="probe")
            trajectories = [t async for group in stream for t in group.trajectories]
            columns = await self._roles.columns(trajectories)
            parity = compare_logprobs(columns, await self._roles.logprobs(trajectories))
        parity.check(self._config.model.dtype)
        return parity

    async def _write_spans(self) -> None:
        """Write down what was recorded outside of steps, so that it is not taken for a part of the next one."""
        recorder.absorb(await self._roles.drain_spans())
        self._journal.spans(recorder.drain())

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights of `step` on the held-out problems, when it is due; returns what it measured."""
        if not self._evaluator.due(step):
            return {}
        with span("evaluate", step):
            metrics = await self._evaluator.evaluate(step)
        self._journal.evaluation(step, metrics)
        return metrics
