"""The fleet around scripted engines: who serves, who is lost, who comes back, and in what order."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf.rollout.fleet import Fleet
from rlhf.rollout.pool import RolloutFailed, RolloutPool
from rlhf.weights.receipts import SyncFailed
from tests.unit.configs import build
from tests.unit.test_rollout import ScriptedEngine, collect


class Engine(ScriptedEngine):
    """Answers probes, unless `stuck`."""

    def __init__(self, index):
        super().__init__(index)
        self.stuck = False
        self.probe = SimpleNamespace(remote=self._probe)

    async def _probe(self):
        if self.stuck:
            await asyncio.sleep(3600)


class Group:
    """Engines as an actor group gives them; `broken_starts` says how many more starts fail."""

    def __init__(self, engines, log):
        self.handles = [Engine(index) for index in range(engines)]
        self.on_lost = None
        self.log = log
        self.broken_starts = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def __len__(self):
        return len(self.handles)

    async def call_rank(self, rank, method, *args, what, deadline_s):
        self.log.append((method, rank))
        if method == "start" and self.broken_starts:
            self.broken_starts -= 1
            raise RuntimeError("no memory")
        return 1

    async def replace(self, rank):
        await self.gate.wait()
        self.log.append(("replace", rank))
        self.handles[rank] = Engine(rank)

    async def end(self, rank):
        self.log.append(("end", rank))
        self.handles[rank] = None


class Weights:
    """The sync as the fleet calls it; `failures` come first, `gate` holds a sync until it is set."""

    def __init__(self, log):
        self.log, self.failures, self.version = log, [], 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def admit(self, engines, workers):
        self.log.append(("admit", *sorted(engines)))

    async def remove(self, engines, *, dead=()):
        self.log.append(("remove", *sorted(engines)))

    async def sync(self, engines=None):
        self.log.append(("sync", *sorted(engines)))
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        return SimpleNamespace(version=self.version)


class Bench:
    def __init__(self, engines=2, **changes):
        self.log, self.said = [], []
        settings = {"rollout.probe_every_s": 0.02, "rollout.probe_deadline_s": 0.02, **changes}
        self.group, self.weights = Group(engines, self.log), Weights(self.log)
        self.pool = RolloutPool(run_seed=1, deadline_s=5)
        self.fleet = Fleet(
            self.group, self.weights, self.pool, build(settings), start_deadline_s=5, say=self.said.append
        )

    async def __aenter__(self):
        await self.fleet.start()
        await self.fleet.join()
        return self

    async def __aexit__(self, *error):
        await self.fleet.close()

    async def until(self, ready):
        async with asyncio.timeout(5):
            while not ready():  # noqa: ASYNC110  what is waited for is many things
                await asyncio.sleep(0.005)

    def state(self, engine):
        return self.fleet.health.state(engine)

    async def engines_used(self):
        return {t.engine for g in await collect(self.pool, 8, 2) for t in g.trajectories}


async def test_engines_serve_from_the_first_sync_on():
    async with Bench() as bench:
        collecting = asyncio.ensure_future(bench.engines_used())
        await asyncio.sleep(0.02)
        assert not collecting.done()
        await bench.fleet.sync()
        assert await collecting == {0, 1}


async def test_a_lost_engine_without_restarts_is_retired_and_the_others_go_on():
    async with Bench() as bench:
        await bench.fleet.sync()
        bench.group.on_lost(1, RuntimeError("killed by SIGKILL"))
        await bench.until(lambda: bench.state(1) == "retired")
        assert await bench.engines_used() == {0}
        await bench.until(lambda: ("remove", 1) in bench.log)
        await bench.fleet.sync()
        assert bench.log[-1] == ("sync", 0)
        assert any("engine 1 is lost: killed by SIGKILL" in line for line in bench.said)
        assert bench.fleet.metrics() == {"fleet/serving": 1, "fleet/lost": 1, "fleet/retries": 0}


async def test_a_deterministic_run_ends_with_the_first_engine_that_does_not_come_back():
    async with Bench(**{"run.deterministic": True, "model.dtype": "float32"}) as bench:
        await bench.fleet.sync()
        bench.group.on_lost(1, RuntimeError("killed by SIGKILL"))
        await bench.until(lambda: bench.state(1) == "retired")
        with pytest.raises(RolloutFailed, match=r"engine 1 is lost.*killed by SIGKILL.*max_restarts"):
            await bench.engines_used()


async def test_a_lost_engine_is_started_again_synced_alone_and_serves_only_then():
    async with Bench(**{"fault_tolerance.max_restarts": 1}) as bench:
        await bench.fleet.sync()
        bench.weights.gate.clear()
        bench.log.clear()
        bench.group.on_lost(1, RuntimeError("killed"))
        await bench.until(lambda: ("sync", 1) in bench.log)
        assert [entry for entry in bench.log if entry != ("end", 1)] == [
            ("remove", 1),
            ("replace", 1),
            ("start", 1),
            ("admit", 1),
            ("sync", 1),
        ]
        assert await bench.engines_used() == {0}
        bench.weights.gate.set()
        await bench.until(lambda: bench.state(1) == "healthy")
        assert await bench.engines_used() == {0, 1}


async def test_a_restart_does_not_disturb_a_sync_and_waits_for_its_turn():
    async with Bench(**{"fault_tolerance.max_restarts": 1}) as bench:
        await bench.fleet.sync()
        bench.group.gate.clear()
        bench.group.on_lost(1, RuntimeError("killed"))
        await bench.until(lambda: ("remove", 1) in bench.log)
        bench.weights.gate.clear()
        syncing = asyncio.ensure_future(bench.fleet.sync())
        await bench.until(lambda: bench.log.count(("sync", 0)) == 1)
        bench.group.gate.set()
        await bench.until(lambda: ("start", 1) in bench.log[-1:])
        await asyncio.sleep(0.05)
        assert ("admit", 1) not in bench.log
        bench.weights.gate.set()
        await syncing
        await bench.until(lambda: bench.state(1) == "healthy")


async def test_an_engine_that_fails_a_sync_is_lost_and_the_others_are_synced_without_it():
    async with Bench(engines=3) as bench:
        bench.weights.failures = [SyncFailed("engine 2 is stuck", frozenset({2}))]
        await bench.fleet.sync()
        assert [e for e in bench.log if e[0] in ("sync", "remove")][:3] == [
            ("sync", 0, 1, 2),
            ("remove", 2),
            ("sync", 0, 1),
        ]
        assert await bench.engines_used() == {0, 1}
        assert bench.state(2) in ("dead", "retired")


async def test_a_sync_that_failed_by_the_senders_fault_is_raised_and_nobody_serves():
    async with Bench() as bench:
        bench.weights.failures = [SyncFailed("the policy sent no tensor", frozenset())]
        with pytest.raises(SyncFailed, match="no tensor"):
            await bench.fleet.sync()
        assert bench.fleet.health.serving() == []


async def test_when_the_last_engine_is_lost_what_waits_ends_with_every_reason():
    async with Bench() as bench:
        await bench.fleet.sync()
        for engine in bench.group.handles:
            engine.delay = lambda request: 3600
        collecting = asyncio.ensure_future(collect(bench.pool, 4, 2))
        await asyncio.sleep(0.02)
        bench.group.on_lost(0, RuntimeError("out of memory"))
        bench.group.on_lost(1, RuntimeError("bus error"))
        with pytest.raises(RolloutFailed, match=r"(?s)no engine is left.*out of memory.*bus error"):
            await collecting
        with pytest.raises(RolloutFailed, match="no engine is left"):
            await bench.fleet.sync()


async def test_a_sync_without_engines_waits_for_the_first_that_comes_back():
    async with Bench(engines=1, **{"fault_tolerance.max_restarts": 1}) as bench:
        bench.weights.failures = [SyncFailed("killed", frozenset({0}))]
        bench.weights.version = 7
        report = await bench.fleet.sync()
        assert report.version == 7
        assert bench.fleet.health.serving() == [0]


async def test_restarts_that_fail_count_against_the_limit():
    async with Bench(**{"fault_tolerance.max_restarts": 2}) as bench:
        await bench.fleet.sync()
        bench.group.broken_starts = 10
        bench.group.on_lost(1, RuntimeError("killed"))
        await bench.until(lambda: bench.state(1) == "retired")
        assert bench.log.count(("replace", 1)) == 2
        assert sum("could not be started again: no memory" in line for line in bench.said) == 2


async def test_an_engine_that_does_not_answer_three_probes_is_lost():
    async with Bench() as bench:
        await bench.fleet.sync()
        bench.group.handles[1].stuck = True
        await bench.until(lambda: bench.state(1) == "suspect")
        assert await bench.engines_used() == {0}
        await bench.until(lambda: bench.state(1) == "retired")
        assert any("engine 1 is lost: probe of rollout engine 1: not done" in line for line in bench.said)


async def test_an_engine_that_answers_again_in_time_gets_requests_again():
    async with Bench() as bench:
        await bench.fleet.sync()
        bench.group.handles[1].stuck = True
        await bench.until(lambda: bench.state(1) == "suspect")
        bench.group.handles[1].stuck = False
        await bench.until(lambda: bench.state(1) == "healthy")
        assert await bench.engines_used() == {0, 1}


async def test_an_engine_that_fails_request_after_request_is_lost_though_it_answers_probes():
    async with Bench() as bench:
        await bench.fleet.sync()
        bench.group.handles[1].fail = RuntimeError("CUDA error")
        collecting = asyncio.ensure_future(collect(bench.pool, 40, 1))
        await bench.until(lambda: bench.state(1) in ("dead", "retired"))
        groups = await collecting
        assert {t.engine for g in groups for t in g.trajectories} == {0}


async def test_a_fault_in_looking_after_the_fleet_ends_what_waits_and_not_in_silence():
    async with Bench(**{"fault_tolerance.max_restarts": 1}) as bench:

        async def broken(rank):
            raise KeyError("a bug")

        bench.group.end = broken
        collecting = asyncio.ensure_future(collect(bench.pool, 1, 1))
        await asyncio.sleep(0.01)
        bench.group.on_lost(0, RuntimeError("killed"))
        bench.group.on_lost(1, RuntimeError("killed"))
        with pytest.raises(KeyError, match="a bug"):
            await collecting
