"""The sync transaction with scripted engines and a scripted policy: order, version, and whom a failure blames."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf.weights import sync as weight_sync
from rlhf.weights.endpoint import Declared, Failure, JoinReport, SendReport
from rlhf.weights.receipts import WIRE_LOST, Receipt, SyncError, SyncFailed
from rlhf.weights.sync import WeightSync

DECLARED = (Declared("a", "float32", (2,)),)
SENT = Receipt(checksums={"a": 1}, bytes=8)


class Engine:
    """Answers as told: `answers[method]` is a value, an exception, or None for never."""

    def __init__(self, log, index):
        self.log, self.index = log, index
        receipt = {"checksums": {"a": 1}, "bytes": 8, "seconds": {"receive": 0.1, "load": 0.2}}
        self.answers = {"weight_receipts": [receipt], "weight_disagreements": [None]}
        self.hanging: set[str] = set()

    def __getattr__(self, method):
        async def call(*args):
            self.log.append((method, self.index, *args))
            if method in self.hanging:
                await asyncio.Event().wait()
            answer = self.answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=call)


class Policy:
    """Two ranks; `failures` come with the next send, `version` is that of the weights."""

    def __init__(self, log):
        self.log = log
        self.version = 0
        self.failures = ()
        self.join_failures = ()
        self.error = None

    async def call(self, method, *args, what, deadline_s):
        if method == "join_transfer":
            (endpoint,) = args
            self.log.append(("join", endpoint.epoch, [e.index for e in endpoint.engines], list(endpoint.workers)))
            return [JoinReport(DECLARED, self.join_failures), JoinReport(DECLARED)]
        self.log.append((method, *args))
        if method == "leave_transfer":
            return [None, None]
        if self.error is not None:
            raise self.error
        return [SendReport(SENT, 0.5, self.version, {"wire": 0.3}, self.failures), SendReport(Receipt(), 0.5, 0)]


class Fleet:
    """A WeightSync over scripted parts."""

    def __init__(self, group_size=2, deadline_s=0.05, pause="drain"):
        self.log = []
        self.policy = Policy(self.log)
        self.engines = {}

        async def address():
            return "127.0.0.1", 1

        self.sync = WeightSync(
            self.policy,
            address,
            transport="gloo",
            bucket_bytes=16,
            deadline_s=deadline_s,
            group_size=group_size,
            pause=pause,
            learner_deadline_s=1.0,
        )

    async def admit(self, *indices):
        new = {index: Engine(self.log, index) for index in indices}
        self.engines |= new
        await self.sync.admit(new, dict.fromkeys(indices, 1))

    def take_log(self):
        taken, self.log[:] = list(self.log), []
        return taken


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch):
    monkeypatch.setattr(weight_sync, "ANSWER_S", 0.05)


async def synced(*indices, **settings):
    fleet = Fleet(**settings)
    await fleet.admit(*indices)
    fleet.take_log()
    return fleet


async def test_a_sync_is_begin_transfer_compare_commit_with_the_version_the_sender_reports():
    fleet = await synced(0)
    fleet.policy.version = 7
    report = await fleet.sync.sync()
    assert fleet.take_log() == [
        ("begin_sync", 0, "drain"),
        ("send_weights", [0]),
        ("weight_receipts", 0),
        ("commit_sync", 0, 7),
    ]
    assert (report.version, report.bytes) == (7, 8)
    assert report.timings.keys() == {"begin", "wire", "engine_receive", "engine_load"}
    metrics = report.metrics()
    assert (metrics["weights/version"], metrics["weights/wire_seconds"]) == (7.0, 0.3)


async def test_the_pause_mode_reaches_the_engines():
    fleet = await synced(0, pause="keep")
    await fleet.sync.sync()
    assert fleet.take_log()[0] == ("begin_sync", 0, "keep")


async def test_admitted_engines_join_in_groups_and_try_what_they_will_be_sent():
    fleet = Fleet(group_size=2)
    await fleet.admit(0, 1, 2)
    assert fleet.take_log() == [
        ("join", 0, [0, 1], [1, 1]),
        ("weight_disagreements", 0, DECLARED),
        ("weight_disagreements", 1, DECLARED),
        ("join", 1, [2], [1]),
        ("weight_disagreements", 2, DECLARED),
    ]
    await fleet.sync.sync([2])
    assert ("send_weights", [1]) in fleet.take_log()
    await fleet.sync.sync()
    assert ("send_weights", [0, 1]) in fleet.take_log()


async def test_an_engine_that_cannot_take_the_declared_tensors_is_an_error_before_the_first_sync():
    fleet = Fleet()
    engine = Engine(fleet.log, 0)
    engine.answers["weight_disagreements"] = [None, "a [2] can't be loaded"]
    with pytest.raises(SyncError, match=r"engine 0 rank 1 can't take these weights: a \[2\]") as caught:
        await fleet.sync.admit({0: engine}, {0: 2})
    # No restart would help.
    assert not isinstance(caught.value, SyncFailed)


async def failed_sync(fleet, engines=None):
    with pytest.raises(SyncFailed) as caught:
        await fleet.sync.sync(engines)
    assert not any(entry[0] == "commit_sync" for entry in fleet.log)
    return caught.value


@pytest.mark.parametrize("method", ["begin_sync", "weight_receipts"])
async def test_a_call_that_fails_blames_its_engine_and_one_that_never_ends_does_at_the_deadline(method):
    fleet = await synced(0, 1, 2)
    fleet.engines[0].answers[method] = RuntimeError("broken")
    fleet.engines[1].hanging.add(method)
    error = await failed_sync(fleet)
    assert error.engines == {0, 1}
    assert "engine 0: broken" in str(error)
    assert f"{method} on engine 1: not done after 0.05 s" in str(error)


async def test_a_receipt_that_differs_blames_its_engine():
    fleet = await synced(0, 1)
    fleet.engines[1].answers["weight_receipts"] = [{"checksums": {"a": 2}, "bytes": 8, "seconds": {}}]
    error = await failed_sync(fleet)
    assert error.engines == {1}
    assert "engine 1 rank 0 has of 1 tensors 1 with other bytes (a)" in str(error)


async def test_a_failed_call_in_a_whole_transfer_blames_its_engine_without_asking_anyone():
    fleet = await synced(0, 1)
    fleet.policy.failures = (Failure(0, 1, "update_weights: wrong shape"),)
    assert (await failed_sync(fleet)).engines == {1}
    assert not any(entry[0] == "probe" for entry in fleet.log)


async def test_a_bucket_that_is_not_delivered_blames_those_of_the_group_that_answer_no_more():
    fleet = await synced(0, 1, 2, 3)
    fleet.engines[1].hanging.add("probe")
    # Engine 0 lost the wire, which is engine 1's doing.
    fleet.policy.failures = (Failure(0, 0, f"{WIRE_LOST}: reset"), Failure(0, None, "a bucket was not delivered"))
    assert (await failed_sync(fleet)).engines == {1}
    asked = [entry[1] for entry in fleet.take_log() if entry[0] == "probe"]
    assert asked == [0, 1]


async def test_in_a_broken_group_that_answers_the_engine_whose_own_call_failed_is_blamed():
    fleet = await synced(0, 1)
    fleet.policy.failures = (Failure(0, 0, f"{WIRE_LOST}: reset"), Failure(0, 1, "update_weights: out of memory"))
    assert (await failed_sync(fleet)).engines == {1}


async def test_nobody_is_blamed_when_everyone_answers():
    fleet = await synced(0, 1)
    fleet.policy.failures = (Failure(0, None, "a bucket was not delivered within 5 s"),)
    error = await failed_sync(fleet)
    assert error.engines == frozenset()
    assert "not delivered within 5 s; every engine still answers" in str(error)


async def test_the_policys_own_failure_comes_out_as_it_is():
    fleet = await synced(0)
    fleet.policy.error = RuntimeError("policy rank 0 was killed")
    with pytest.raises(RuntimeError, match="policy rank 0 was killed") as caught:
        await fleet.sync.sync()
    assert not isinstance(caught.value, SyncError)


async def test_after_a_failure_the_others_sync_in_a_new_epoch_and_the_blamed_one_is_not_called_again():
    fleet = await synced(0, 1, 2, 3)
    fleet.engines[1].hanging.add("begin_sync")
    error = await failed_sync(fleet)
    fleet.policy.version = 3
    fleet.take_log()
    await fleet.sync.remove(error.engines)
    report = await fleet.sync.sync()
    log = fleet.take_log()
    assert report.version == 3
    assert not any(entry[1:2] == (1,) for entry in log if entry[0] not in ("join", "leave_transfer"))
    # Whatever is on the old wires is not used: the epochs of the failed sync, 0 and 1, are left.
    assert [entry[1] for entry in log if entry[0] == "leave_transfer"] == [0, 1]
    joined = [(epoch, engines) for kind, epoch, engines, _ in (e for e in log if e[0] == "join")]
    assert sorted(engine for _, engines in joined for engine in engines) == [0, 2, 3]
    assert all(epoch > 1 for epoch, _ in joined)


async def test_a_restarted_engine_joins_and_syncs_alone():
    fleet = await synced(0, 1)
    await fleet.sync.sync()
    await fleet.sync.remove([1], dead=[1])
    await fleet.sync.sync()
    fleet.take_log()
    await fleet.admit(1)
    report = await fleet.sync.sync([1])
    log = fleet.take_log()
    assert report.version == 0
    assert {entry[1] for entry in log if entry[0] in ("begin_sync", "commit_sync", "weight_disagreements")} == {1}
    assert [entry[1:3] for entry in log if entry[0] == "join"] == [(2, [1])]


async def test_who_is_retired_is_asked_to_leave_and_who_is_dead_is_not_called():
    fleet = await synced(0, 1, 2)
    await fleet.sync.remove([0], dead=[2])
    assert fleet.take_log() == [("leave_transfer", 0)]
    assert [group.engines for group in fleet.sync.groups] == [(1,)]


async def test_an_engine_that_does_not_come_to_its_group_is_blamed_at_admission():
    fleet = await synced(0)
    fleet.policy.join_failures = (Failure(1, None, "the group did not meet within 5 s"),)
    new = {1: Engine(fleet.log, 1), 2: Engine(fleet.log, 2)}
    new[2].hanging.add("probe")
    with pytest.raises(SyncFailed) as caught:
        await fleet.sync.admit(new, {1: 1, 2: 1})
    assert caught.value.engines == {2}
    fleet.policy.join_failures = ()
    await fleet.sync.remove([2])
    await fleet.sync.sync()
    assert [group.engines for group in fleet.sync.groups] == [(0,), (1,)]


async def test_a_failed_commit_blames_its_engine():
    fleet = await synced(0, 1)
    fleet.engines[1].answers["commit_sync"] = RuntimeError("the prefix cache was not reset")
    with pytest.raises(SyncFailed, match="prefix cache") as caught:
        await fleet.sync.sync()
    assert caught.value.engines == {1}


async def test_a_sync_without_engines_is_an_error():
    with pytest.raises(SyncError, match="no engine"):
        await Fleet().sync.sync()
