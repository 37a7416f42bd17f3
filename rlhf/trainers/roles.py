"""The roles of a run: starts each on its devices, and offers the loop their calls by name.

Every call has a deadline and names what it waits for. Start-up is concurrent: on two cores an engine takes as long to
start as everything else together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.algorithms.catalogue import needs_old_logprobs, policy_is_reference
from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.session import Session
from rlhf.cluster.wait import wait_all
from rlhf.config.schema import Config, ReferenceConfig, RewardModelConfig
from rlhf.rewards.types import SampleScore
from rlhf.rollout.fleet import Fleet
from rlhf.rollout.pool import RolloutPool
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.spans import Span, now, recorder
from rlhf.trainers.batch import learner_sample
from rlhf.trainers.blueprints import make_blueprints, transport
from rlhf.trainers.reward_role import RewardRole
from rlhf.trainers.scorer_pool import ScorerPool, shares
from rlhf.trajectories import Columns, Group, Trajectory
from rlhf.weights.receipts import SyncError
from rlhf.weights.sync import SyncReport, WeightSync

if TYPE_CHECKING:
    from rlhf.batching import Estimates, LearnerSample, RewardedSample
    from rlhf.learners.learner import UpdateResult

T = TypeVar("T")
# What has no setting of its own: short calls that only ask, and the writing of a Parquet file.
_ASK_S = 60.0
_WRITE_S = 300.0
# Starting an engine or loading a model takes this long at most, or as long as one of its calls where that is longer.
_START_S = 600.0


class Roles:
    """The started roles of a run. Made by `start_roles`."""

    def __init__(
        self,
        config: Config,
        session: Session,
        groups: Mapping[str, ActorGroup],
        extra_functions: int,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._session = session
        self._policy = groups["policy"]
        self._critic = groups.get("critic")
        self._recorder = groups["recorder"]
        reward_model = config.reward.model
        self.reward_model_weight = reward_model.weight if reward_model is not None else 0.0
        if policy_is_reference(config):
            self._reference: ScorerPool | None = ScorerPool(
                self._policy, together=True, deadline_s=config.policy.deadline_s, method="score_as_reference"
            )
        else:
            self._reference = self._scorer_pool(groups, "reference", config.reference)
        self._reward_model = self._scorer_pool(groups, "reward_model", reward_model)
        self._reward = self._reward_role(groups, extra_functions, say)
        rollout, weights = config.rollout, config.weights
        self.pool = RolloutPool(
            run_seed=config.run.seed,
            deadline_s=rollout.deadline_s,
            attempts=rollout.attempts,
            on_error=rollout.on_error,
            static_engines=rollout.engines if config.run.deterministic else None,
        )
        sender = WeightSync(
            self._policy,
            self._policy.meeting_address,
            transport=transport(config, session.needs.device),
            bucket_bytes=weights.bucket_bytes,
            deadline_s=weights.deadline_s,
            group_size=weights.group_size,
            pause=weights.pause,
            # A sync of an engine that comes back may have to wait for what the policy is doing.
            learner_deadline_s=config.policy.deadline_s,
        )
        self.fleet = Fleet(
            groups["rollout"],
            sender,
            self.pool,
            config,
            start_deadline_s=max(_START_S, rollout.deadline_s),
            say=say,
        )

    @staticmethod
    def _scorer_pool(
        groups: Mapping[str, ActorGroup], role: str, settings: ReferenceConfig | RewardModelConfig | None
    ) -> ScorerPool | None:
        if settings is None or role not in groups:
            return None
        return ScorerPool(groups[role], together=settings.sharded, deadline_s=settings.deadline_s)

    def _reward_role(
        self, groups: Mapping[str, ActorGroup], extra_functions: int, say: Callable[[str], None]
    ) -> RewardRole | None:
        if "reward" not in groups:
            return None
        return RewardRole(
            groups["reward"],
            self._config.reward,
            functions=len(self._config.reward.functions) + extra_functions,
            restarts=self._config.fault_tolerance.max_restarts,
            say=say,
        )

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work`; the first failure of any role ends it and is raised."""
        return await self._session.supervisor.guard(work)

    async def setup(self) -> list[str]:
        """Load models, start engines, and let policy and engines meet in a transfer group.

        Returns what a person should know: which models have to be given padded rows, and why.
        """
        started = self._learners()
        pools = [pool for pool in (self._reference, self._reward_model) if pool is not None]
        scorers = [pool for pool in pools if pool.group is not self._policy]
        learned, _, scored = await asyncio.gather(
            asyncio.gather(*(_load(group, deadline_s) for group, deadline_s in started)),
            self.fleet.start(),
            asyncio.gather(*(_load(pool.group, max(_START_S, pool.deadline_s)) for pool in scorers)),
        )
        # One dry run at a time wants the cores for itself: what can't fit has to fail for that reason.
        for group, deadline_s in started:
            await group.call("dry_run", what="dry run of the largest micro-batch", deadline_s=deadline_s)
        await self.fleet.join()
        return [note for note in [*learned, *scored] if note is not None]

    async def sync(self, version: int) -> SyncReport:
        """Bring the policy's weights, which have to be `version`, to all engines, as one transaction."""
        report = await self.fleet.sync()
        if report.version != version:
            raise SyncError(f"weight sync: the policy sent version {report.version} when {version} was due")
        return report

    async def close(self) -> None:
        """End what looks after the roles; the session ends the roles themselves."""
        await self.fleet.close()

    async def score(self, group: Group, step: int) -> list[SampleScore]:
        """Rewards of a group's samples, in their order; without functions nothing is added to what a model says."""
        if self._reward is None:
            return [SampleScore(0.0, {}) for _ in group.trajectories]
        return await self._reward.score(group, step)

    async def reference_logprobs(self, group: Group) -> Mapping[str, Any] | None:
        """For each sample of a group the reference to its reference log-probs; None where the run has no reference."""
        if self._reference is None:
            return None
        return await self._reference.score(group, f"reference log-probs of group {group.group_id}")

    async def reward_model_scores(self, group: Group) -> Mapping[str, float] | None:
        """The reward model's scores of a group, by sample id; None where the run has no reward model."""
        if self._reward_model is None:
            return None
        return await self._fetch(await self._reward_model.score(group, f"reward model scores of {group.group_id}"))

    async def _fetch(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The scores themselves; only for what is small and the driver decides with."""
        parts = list({id(reference): reference for reference in found.values()}.values())
        fetched = await wait_all(parts, what="scores", deadline_s=_ASK_S)
        return {sample_id: values for part in fetched for sample_id, values in part.items()}

    async def predict(self, samples: Sequence[LearnerSample]) -> list[LearnerSample]:
        """The samples with old log-probs ‖ critic's values, each where the run needs it."""
        old, values = await asyncio.gather(
            self._predictions(self._policy if needs_old_logprobs(self._config) else None, samples),
            self._predictions(self._critic, samples),
        )
        return [s.with_scores(old_logprobs=old.get(s.sample_id), values=values.get(s.sample_id)) for s in samples]

    async def _predictions(self, group: ActorGroup | None, samples: Sequence[LearnerSample]) -> dict[str, Any]:
        """For each sample the reference to the columns of the rank that it was on."""
        if group is None:
            return {}
        settings = self._config.policy if group is self._policy else self._config.critic
        what = f"{group.role} scores of {len(samples)} samples"
        return shares(await group.call("score", samples, num_returns=2, what=what, deadline_s=settings.deadline_s))

    async def estimate(
        self, samples: Sequence[RewardedSample], kl_coefficient: float
    ) -> tuple[list[LearnerSample], Estimates]:
        """Advantages (and returns, with a critic): the samples that lead to them, and what the driver reads."""
        groups = list(dict.fromkeys(entry.sample.group_id for entry in samples))
        count = len(groups) * (1 if self._critic is None else 2)
        (spans, estimates), *columns = await self._policy.call_rank(
            0,
            "estimate",
            samples,
            kl_coefficient,
            num_returns=1 + count,
            what="advantages",
            deadline_s=self._config.policy.deadline_s,
        )
        recorder.absorb(spans)
        advantages = dict(zip(groups, columns, strict=False))
        returns = dict(zip(groups, columns[len(groups) :], strict=False))
        found = [
            entry.sample.with_scores(
                advantages=advantages[entry.sample.group_id], returns=returns.get(entry.sample.group_id)
            )
            for entry in samples
        ]
        return found, estimates

    async def update(self, step: int, samples: Sequence[LearnerSample], kl_coefficient: float) -> dict[str, float]:
        """One update of the policy ‖ one of the critic, where there is one; returns their metrics."""
        learned, values = await asyncio.gather(
            self._policy.call(
                "update",
                step,
                samples,
                kl_coefficient,
                what=f"update of step {step}",
                deadline_s=self._config.policy.deadline_s,
            ),
            self.update_critic(self._config.critic.warmup_batches + step, samples),
        )
        return {**_absorb(learned, step), **values}

    async def update_critic(self, batch: int, samples: Sequence[LearnerSample]) -> dict[str, float]:
        """Update the critic on its `batch`-th batch, of 1 to all, the warm-up's included; no metrics without one."""
        if self._critic is None:
            return {}
        results = await self._critic.call(
            "update",
            batch,
            samples,
            what=f"critic's update on batch {batch}",
            deadline_s=self._config.critic.deadline_s,
        )
        return _absorb(results, max(0, batch - self._config.critic.warmup_batches))

    async def record(self, step: int, groups: Sequence[Group]) -> None:
        """Write the step's samples to `trajectories/`."""
        await self._recorder.call("write", step, groups, what=f"trajectories of step {step}", deadline_s=_WRITE_S)

    async def columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Columns]:
        """Fetch the columns of a few trajectories to the driver; only the parity probe does."""
        found = await wait_all([t.columns for t in trajectories], what="columns of the probe", deadline_s=_ASK_S)
        return {t.sample_id: columns for t, columns in zip(trajectories, found, strict=True)}

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """The policy's own log-probs of a few samples, fetched to the driver; only the parity probe does."""
        samples = [learner_sample(trajectory) for trajectory in trajectories]
        return await self._fetch(await self._predictions(self._policy, samples))

    async def drain_spans(self) -> list[Span]:
        """The engines' spans since the last call; the other roles hand theirs over with their results."""
        return await self.fleet.drain_spans()

    async def save(self, folder: Path) -> list[Any]:
        """Snapshot of policy ‖ critic for a checkpoint in `folder`; their files are written behind it."""
        learners = self._learners()
        for group, _ in learners:
            (folder / group.role).mkdir()
        saves = [
            group.call("save", str(folder / group.role), what=f"snapshot of the {group.role}", deadline_s=deadline_s)
            for group, deadline_s in learners
        ]
        return [report for reports in await asyncio.gather(*saves) for report in reports]

    async def finish_save(self, deadline_s: float) -> list[Any]:
        """Wait until what `save` began is written, while the learners go on with their work."""
        writes = [
            group.call_beside("finish_save", what=f"writing of the {group.role}'s checkpoint", deadline_s=deadline_s)
            for group, _ in self._learners()
        ]
        return [report for reports in await asyncio.gather(*writes) for report in reports]

    async def load(self, folder: Path, on_world_size_change: str) -> dict[str, list[Any]]:
        """Give policy ‖ critic the state of the verified checkpoint in `folder`; each rank's report by role."""
        deadline_s = self._config.checkpoint.deadline_s
        loads = [
            group.call(
                "load",
                str(folder / group.role),
                on_world_size_change,
                what=f"loading of the {group.role}",
                deadline_s=max(deadline_s, own_s),
            )
            for group, own_s in self._learners()
        ]
        roles = [group.role for group, _ in self._learners()]
        return dict(zip(roles, await asyncio.gather(*loads), strict=True))

    def _learners(self) -> list[tuple[ActorGroup, float]]:
        """The groups that train, each with the deadline of its calls."""
        both = [(self._policy, self._config.policy), (self._critic, self._config.critic)]
        return [(group, settings.deadline_s) for group, settings in both if group is not None]

    async def export(self, path: Path) -> None:
        """Write the trained policy as a checkpoint for transformers and vLLM."""
        await self._policy.call("export", path, what="export", deadline_s=self._config.policy.deadline_s)


async def _load(group: ActorGroup, deadline_s: float) -> str | None:
    """Let the ranks of a learner or scorer meet, and load the model; returns a note where its rows are padded."""
    master = await group.meeting_address(0)
    reasons = await group.call("setup", master, what=f"loading the {group.role}", deadline_s=deadline_s)
    return None if reasons[0] is None else f"{group.role}: prompts are computed for each sample, {reasons[0]}"


def _absorb(results: Sequence[UpdateResult], step: int) -> dict[str, float]:
    """Record the ranks' spans; their metrics, which are equal."""
    for result in results:
        recorder.absorb(result.spans, step)
    return results[0].metrics


@asynccontextmanager
async def start_roles(
    config: Config,
    session: Session,
    folder: RunFolder,
    reward_functions: Mapping[str, bytes],
    own_algorithms: Mapping[str, bytes],
    say: Callable[[str], None],
) -> AsyncIterator[Roles]:
    """Start every role of the run within `session`; a failure of any of them ends the others' start."""
    started = now()
    await session.placement.reserve(session.needs, config.placement.deadline_s)
    blueprints = make_blueprints(config, session.needs.device, folder, reward_functions, own_algorithms)
    roles_started = ", ".join(f"{role} x{blueprint.ranks}" for role, blueprint in blueprints.items())
    say(f"starting {roles_started}; their output goes to {folder.logs}")
    starts = [
        ActorGroup.create(
            role,
            blueprint.plain,
            blueprint.ranks,
            session=session,
            args_for_rank=blueprint.args_for_rank,
            deadline_s=config.placement.deadline_s,
            placement=session.placement.slots.get(role),
            env=blueprint.env,
            log_dir=folder.logs,
        )
        for role, blueprint in blueprints.items()
    ]
    groups = dict(zip(blueprints, await asyncio.gather(*starts), strict=True))
    roles = Roles(config, session, groups, len(reward_functions), say)
    try:
        for note in await roles.guard(roles.setup()):
            say(note)
        say(f"all roles are ready after {now() - started:.0f} s")
        yield roles
    finally:
        await roles.close()
