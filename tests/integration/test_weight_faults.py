"""A fleet's syncs on real vLLM when things break: who is blamed, and that the others go on without a restart.

Two engines of one model are started for the module; the tests run in order, and the last ones end them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rlhf.rollout.types import GenerationRequest, Sampling
from rlhf.weights.receipts import SyncFailed
from tests.integration.engines import CALL_S, DoomedLearner, Engine, Trainer, at_bucket, sync, weight_sync
from tests.tiny import EOS_ID

PROMPT = [5, 76, 5, 84]  # "1+1="
# The tiny model has 0.33 million float32 parameters, 1.3 MB: five buckets.
BUCKET_BYTES = 300_000
# What a stuck engine may cost in these tests.
DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def fleet(ray_cluster: None, tiny_untied: Path) -> SimpleNamespace:
    """Two engines and a trainer that was joined with neither."""
    engines = [Engine(tiny_untied, index=i, wait=False) for i in range(2)]
    return SimpleNamespace(
        engines=[engine.started() for engine in engines],
        trainer=Trainer(tiny_untied, bucket_bytes=BUCKET_BYTES),
        path=tiny_untied,
    )


def join(fleet: SimpleNamespace, **settings: Any) -> None:
    fleet.trainer.join([engine.handle for engine in fleet.engines], **{"deadline_s": DEADLINE_S, **settings})


def check(fleet: SimpleNamespace, *indices: int) -> None:
    for index in indices:
        fleet.engines[index].parity(fleet.trainer, PROMPT).check("float32")


def buckets(trainer: Trainer) -> int:
    return len(trainer.sender._source._pieces)


@pytest.mark.parametrize("group_size", [2, 1])
def test_two_engines_are_served_in_one_group_and_in_two(fleet, group_size):
    join(fleet, group_size=group_size)
    assert [len(group.engines) for group in fleet.trainer.weights.groups] == [group_size] * (2 // group_size)
    for version in (1, 2):
        fleet.trainer.move()
        report = sync(fleet.trainer, version)
        check(fleet, 0, 1)
        assert report.version == version
    # Of one engine: each bucket is packed once, however many groups there are.
    assert report.bytes == sum(p.numel() * 4 for _, p in fleet.trainer.named_parameters_for_sync())


def test_a_sync_that_breaks_in_any_bucket_leaves_nobody_serving_and_the_next_one_is_good(fleet):
    join(fleet)
    assert buckets(fleet.trainer) >= 4
    for number in range(buckets(fleet.trainer)):
        fleet.trainer.move()

        def fail(number: int = number) -> None:
            raise RuntimeError(f"no bucket {number}")

        with at_bucket(number, fail), pytest.raises(RuntimeError, match=f"no bucket {number}"):
            sync(fleet.trainer, 10)
        for engine in fleet.engines:
            with pytest.raises(ray.exceptions.RayTaskError, match="no committed weights"):
                engine.generate(PROMPT)
        fleet.trainer.move()
        sync(fleet.trainer, 11 + number)
        check(fleet, 0, 1)


def test_with_keep_a_running_response_goes_on_with_the_new_weights(fleet):
    join(fleet, pause="keep")
    sync(fleet.trainer, 20)
    before = Trainer(fleet.path)
    before.model.load_state_dict(fleet.trainer.model.state_dict())
    fleet.trainer.move()
    request = GenerationRequest("kept", tuple(PROMPT), Sampling(1.0, 1.0, -1, (), 200, 200), seed=3)
    running = fleet.engines[0].handle.generate.options(num_returns=2).remote(request)
    time.sleep(0.2)
    sync(fleet.trainer, 21)
    header, columns = ray.get(list(running), timeout=CALL_S)
    versions = columns.weight_versions[columns.loss_mask]
    assert header.weight_version == 20
    assert sorted(set(versions.tolist())) == [20, 21]
    assert (np.diff(versions) >= 0).all()
    # Tokens of the old version agree with the old weights, those of the new one with the new, on the same prefix.
    for trainer, version in ((before, 20), (fleet.trainer, 21)):
        own = (columns.weight_versions == version) & columns.loss_mask
        expected = trainer.logprobs(columns, 1.0, never=[EOS_ID])
        assert np.abs(columns.logprobs[own] - expected[own]).max() <= 1e-4


def test_with_drain_a_running_response_is_finished_by_the_old_weights(fleet):
    join(fleet, pause="drain")
    sync(fleet.trainer, 30)
    request = GenerationRequest("drained", tuple(PROMPT), Sampling(1.0, 1.0, -1, (), 100, 100), seed=3)
    running = fleet.engines[0].handle.generate.options(num_returns=2).remote(request)
    time.sleep(0.1)
    sync(fleet.trainer, 31)
    _, columns = ray.get(list(running), timeout=CALL_S)
    assert set(columns.weight_versions[columns.loss_mask].tolist()) == {30}
    assert fleet.engines[0].generate(PROMPT)[0].weight_version == 31


def test_a_learner_killed_in_a_bucket_is_not_blamed_on_engines_and_they_sync_with_another(fleet):
    learner = ray.remote(DoomedLearner).options(num_cpus=0).remote(fleet.path, BUCKET_BYTES)

    class Group:
        async def call(self, method: str, *args: Any, what: str, deadline_s: float) -> list[Any]:
            return [await getattr(learner, method).remote(*args)]

    weights = weight_sync(Group(), BUCKET_BYTES, deadline_s=4 * DEADLINE_S)
    ray.get([engine.handle.begin_sync.remote("drain") for engine in fleet.engines], timeout=CALL_S)
    asyncio.run(weights.admit({i: e.handle for i, e in enumerate(fleet.engines)}, {0: 1, 1: 1}))
    with pytest.raises(ray.exceptions.RayActorError):
        asyncio.run(weights.sync())
    join(fleet)
    sync(fleet.trainer, 41)
    check(fleet, 0, 1)


def blamed(fleet: SimpleNamespace, bucket: int, action: Any) -> SyncFailed:
    """The failure of a sync in whose bucket `action()` was done."""
    fleet.trainer.move()
    with at_bucket(bucket, action), pytest.raises(SyncFailed) as caught:
        sync(fleet.trainer, 50)
    return caught.value


def goes_on_without(fleet: SimpleNamespace, index: int) -> None:
    """The other engine serves again after a removal and a sync, without a restart."""
    asyncio.run(fleet.trainer.weights.remove({index}))
    sync(fleet.trainer, 51)
    check(fleet, 1 - index)


def test_a_stopped_engine_is_blamed_at_the_deadline_and_its_group_goes_on_without_it(fleet):
    join(fleet)
    pid = fleet.engines[1].core_pid()
    error = blamed(fleet, 1, lambda: os.kill(pid, signal.SIGSTOP))
    assert error.engines == {1}
    assert "not delivered within 5 s" in str(error) or "not done after 5 s" in str(error)
    goes_on_without(fleet, 1)
    os.kill(pid, signal.SIGKILL)


def test_a_restarted_engine_joins_and_syncs_alone_while_the_other_keeps_its_epoch(fleet):
    (kept,) = fleet.trainer.weights.groups
    ray.kill(fleet.engines[1].handle)
    fleet.engines[1] = Engine(fleet.path, index=1)
    asyncio.run(fleet.trainer.weights.admit({1: fleet.engines[1].handle}, {1: 1}))
    assert fleet.trainer.weights.groups[0] == kept
    serving = fleet.engines[0].generate(PROMPT)[0].weight_version
    asyncio.run(fleet.trainer.weights.sync([1]))
    check(fleet, 0, 1)
    assert fleet.engines[0].generate(PROMPT)[0].weight_version == serving
    fleet.trainer.move()
    sync(fleet.trainer, 60)
    check(fleet, 0, 1)


@pytest.mark.timeout(300)
def test_an_engine_core_killed_in_a_bucket_is_blamed_at_once_and_the_other_goes_on(fleet):
    # In one group again, so that the other one loses its wire as well. Nobody waits for the deadline.
    join(fleet, deadline_s=3600.0)
    pid = fleet.engines[1].core_pid()

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        # Gone for good before the next bucket.
        threading.Event().wait(0.2)

    error = blamed(fleet, 2, kill)
    assert error.engines == {1}
    assert f"(pid {pid}): killed by signal 9" in str(error)
    goes_on_without(fleet, 1)
