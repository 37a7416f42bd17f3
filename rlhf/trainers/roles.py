"""The roles of a run: starts each on its devices, and offers the loop their calls by name.

Every call has a deadline and names what it waits for. Start-up is concurrent: on two cores an engine takes as long to
start as everything else together.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.session import Session
from rlhf.cluster.wait import wait_all
from rlhf.config.schema import Config
from rlhf.rollout.pool import RolloutPool
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.spans import Span, now, recorder
from rlhf.trainers.batch import learner_sample
from rlhf.trainers.blueprints import make_blueprints, transport
from rlhf.trajectories import Columns, Group, Trajectory
from rlhf.weights.endpoint import Endpoint
from rlhf.weights.sync import SyncReport, sync_weights

if TYPE_CHECKING:
    from rlhf.batching import LearnerSample
    from rlhf.rewards.types import SampleScore

T = TypeVar("T")
# What has no setting of its own: short calls that only ask, and the writing of a Parquet file.
_ASK_S = 60.0
_WRITE_S = 300.0
# Starting an engine or loading a model takes this long at most, or as long as one of its calls where that is longer.
_START_S = 600.0
# A killed reward worker is replaced before the next call: imports of a user's module included.
_REBOOT_S = 120.0


class Roles:
    """The started roles of a run. Made by `start_roles`."""

    def __init__(
        self, config: Config, session: Session, groups: Mapping[str, ActorGroup], extra_functions: int
    ) -> None:
        self._config = config
        self._session = session
        self._policy = groups["policy"]
        self._rollout = groups["rollout"]
        self._reward = groups["reward"]
        self._recorder = groups["recorder"]
        self._reference = groups.get("reference")
        self._next_reference = itertools.cycle(range(len(self._reference or ())))
        self._reward_calls = len(config.reward.functions) + extra_functions
        self._scoring = 0
        self._referring = 0
        self._transport = transport(config, session.needs.device)
        self.pool = RolloutPool(self._rollout.handles, run_seed=config.run.seed, deadline_s=config.rollout.deadline_s)

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work`; the first failure of any role ends it and is raised."""
        return await self._session.supervisor.guard(work)

    async def setup(self) -> None:
        """Load models, start engines, and let policy and engines meet in a transfer group."""
        rollout_s = max(_START_S, self._config.rollout.deadline_s)
        policy_s = self._config.policy.deadline_s
        master = await self._policy.free_address(0)
        _, workers, _ = await asyncio.gather(
            self._policy.call("setup", master, what="loading the policy", deadline_s=policy_s),
            self._rollout.call("start", what="start of vLLM", deadline_s=rollout_s),
            self._set_up_reference(),
        )
        # The dry run wants the cores for itself: what can't fit has to fail for that reason.
        await self._policy.call("dry_run", what="dry run of the largest micro-batch", deadline_s=policy_s)
        await self._join_transfer(workers)

    async def _set_up_reference(self) -> None:
        if self._reference is not None:
            await self._reference.call(
                "setup", what="loading the reference", deadline_s=max(_START_S, self._config.reference.deadline_s)
            )

    async def _join_transfer(self, workers: Sequence[int]) -> None:
        address, port = await self._policy.free_address(0)
        weights = self._config.weights
        endpoint = Endpoint(
            self._transport, address, port, self._rollout.handles, workers, weights.bucket_bytes, weights.deadline_s
        )
        await self._policy.call("join_transfer", endpoint, what="transfer group", deadline_s=2 * weights.deadline_s)

    async def sync(self, version: int) -> SyncReport:
        """Bring the policy's weights to all engines, as one transaction."""
        return await sync_weights(
            self._policy, self._rollout.handles, version, deadline_s=self._config.weights.deadline_s
        )

    async def score(self, group: Group, step: int) -> list[SampleScore]:
        """Rewards of a group's samples, in their order.

        The functions' own deadlines are kept in the pool; the one here is for all calls that queue before, each of
        which may end with a killed worker.
        """
        self._scoring += 1
        try:
            result = await self._reward.call_rank(
                0,
                "score",
                group.draw.prompt,
                group.trajectories,
                step,
                what=f"rewards of group {group.group_id}",
                deadline_s=_ASK_S + self._scoring * self._reward_calls * (self._config.reward.timeout_s + _REBOOT_S),
            )
        finally:
            self._scoring -= 1
        recorder.absorb(result.spans, step)
        scores: list[SampleScore] = result.scores
        return scores

    async def reference_logprobs(self, group: Group) -> Any | None:
        """Reference to the reference model's log-probs of a group; None where the run has no reference."""
        if self._reference is None:
            return None
        samples = [learner_sample(trajectory) for trajectory in group.trajectories]
        self._referring += 1
        try:
            spans, columns = await self._reference.call_rank(
                next(self._next_reference),
                "score",
                samples,
                num_returns=2,
                what=f"reference log-probs of group {group.group_id}",
                # A replica takes one group at a time, so the groups before this one count as well.
                deadline_s=self._referring * self._config.reference.deadline_s,
            )
        finally:
            self._referring -= 1
        recorder.absorb(spans)
        return columns

    async def update(self, step: int, samples: Sequence[LearnerSample]) -> dict[str, float]:
        """One update on all ranks; returns its metrics."""
        results = await self._policy.call(
            "update", step, samples, what=f"update of step {step}", deadline_s=self._config.policy.deadline_s
        )
        for result in results:
            recorder.absorb(result.spans, step)
        metrics: dict[str, float] = results[0].metrics
        return metrics

    async def record(self, step: int, groups: Sequence[Group]) -> None:
        """Write the step's samples to `trajectories/`."""
        await self._recorder.call("write", step, groups, what=f"trajectories of step {step}", deadline_s=_WRITE_S)

    async def columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Columns]:
        """Fetch the columns of a few trajectories to the driver; only the parity probe does."""
        found = await wait_all([t.columns for t in trajectories], what="columns of the probe", deadline_s=_ASK_S)
        return {t.sample_id: columns for t, columns in zip(trajectories, found, strict=True)}

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Mapping[str, Any]]:
        """The policy's own log-probs of these samples; each rank's share."""
        samples = [learner_sample(trajectory) for trajectory in trajectories]
        shares: list[Mapping[str, Any]] = await self._policy.call(
            "logprobs", samples, what="policy log-probs of the probe", deadline_s=self._config.policy.deadline_s
        )
        return shares

    async def drain_spans(self) -> list[Span]:
        """The engines' spans since the last call; the other roles hand theirs over with their results."""
        drained = await self._rollout.call("drain_spans", what="spans of the engines", deadline_s=_ASK_S)
        return [span for spans in drained for span in spans]

    async def export(self, path: Path) -> None:
        """Write the trained policy as a checkpoint for transformers and vLLM."""
        await self._policy.call("export", path, what="export", deadline_s=self._config.policy.deadline_s)


@asynccontextmanager
async def start_roles(
    config: Config,
    session: Session,
    folder: RunFolder,
    reward_functions: Mapping[str, bytes],
    say: Callable[[str], None],
) -> AsyncIterator[Roles]:
    """Start every role of the run within `session`; a failure of any of them ends the others' start."""
    started = now()
    await session.placement.reserve(session.needs, config.placement.deadline_s)
    blueprints = make_blueprints(config, session.needs.device, folder, reward_functions)
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
    roles = Roles(config, session, groups, len(reward_functions))
    await roles.guard(roles.setup())
    say(f"all roles are ready after {now() - started:.0f} s")
    yield roles
