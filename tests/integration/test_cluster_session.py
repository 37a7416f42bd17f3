"""Sessions with Ray: joining, refusing, and that nothing of ours is left however the driver ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.placement import Slot
from rlhf.cluster.preflight import Refused
from rlhf.cluster.process import end
from rlhf.cluster.session import Session, open_session
from rlhf.cluster.supervision import ActorFailed
from rlhf.cluster.wait import set_explainer
from tests.integration.cluster_actors import SHAPE, Worker, alive, config

DRIVER = [sys.executable, "-m", "tests.integration.cluster_actors"]
GONE_S = 60


@pytest.mark.parametrize(
    ("ending", "number", "code"),
    [
        ("return", None, 0),
        ("raise", None, 1),
        ("wait", signal.SIGINT, -signal.SIGINT),
        ("wait", signal.SIGTERM, signal.SIGTERM),
        ("wait", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_is_left_however_the_driver_ends(
    tmp_path: Path, ending: str, number: signal.Signals | None, code: int
) -> None:
    driver = subprocess.Popen(
        [*DRIVER, "drive", ending, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    words = next(line for line in driver.stdout if line.startswith("READY")).split()
    # The actors' children have sessions of their own and don't watch their parents.
    left = {process.pid for process in psutil.Process(driver.pid).children(recursive=True)} | set(map(int, words[2:]))
    assert len(left) > 8 or ending != "wait"
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)  # what a terminal does
    elif number is not None:
        driver.send_signal(number)
    driver.communicate(timeout=GONE_S)
    assert driver.returncode == code
    deadline = time.monotonic() + GONE_S
    while (still := [pid for pid in left if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert still == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Session]:
    """A cluster with three slots, for others to join."""
    session = open_session(config(ranks=2, engines=1), SHAPE)
    yield session
    session.close()
    set_explainer(lambda error, what: error)


def _join(ranks: int, address: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RAY_ADDRESS": address}
    command = [*DRIVER, "join", str(ranks)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_cluster_with_enough_slots_is_joined_and_stays_when_we_leave(cluster: Session) -> None:
    done = _join(2, ray.get_runtime_context().gcs_address)
    assert done.returncode == 0, done.stderr
    assert "joined the Ray cluster at" in done.stdout and "[(0, 'set', True), (1, 'set', True)]" in done.stdout
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 3


def test_a_joined_cluster_with_too_few_slots_is_refused_with_numbers(cluster: Session) -> None:
    done = _join(8, ray.get_runtime_context().gcs_address)
    assert done.returncode == 2, done.stderr
    assert "needs 9 CPU slots, cluster has 3" in done.stdout
    assert "policy needs 8 x 1 = 8 CPU slots" in done.stdout and "rollout needs 1 x 1 = 1 CPU slots" in done.stdout


def test_a_ray_client_address_is_refused_with_the_reason() -> None:
    done = _join(1, "ray://127.0.0.1:10001")
    assert done.returncode == 2, done.stderr
    assert "Ray Client can't be used" in done.stdout


def test_a_second_session_in_one_process_is_refused(cluster: Session) -> None:
    with pytest.raises(Refused, match="connected to Ray already"):
        open_session(config(), SHAPE)


@pytest.fixture
def other_node(cluster: Session) -> Iterator[str]:
    """Id of a second node of the cluster, with the resource `second`: for Ray, a second raylet here is one."""
    context = ray.get_runtime_context()
    command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={context.gcs_address}", "--block"]
    settings = ["--num-cpus=2", '--resources={"second": 2}', "--disable-usage-stats"]
    raylet = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _other_than(context.get_node_id())
    finally:
        processes = psutil.Process(raylet.pid).children(recursive=True)
        raylet.kill()  # asked politely it takes 30 s
        raylet.wait(timeout=60)
        end(processes, grace_s=0.5)


def _other_than(own: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        if others:
            return str(others[0])
        time.sleep(0.1)
    raise AssertionError("the second node did not come up in 60 s")


async def test_an_actor_killed_on_another_node_is_named_with_its_signal_and_log(
    cluster: Session, other_node: str, tmp_path: Path
) -> None:
    second = ray.util.placement_group([{"CPU": 1, "second": 1}] * 2)
    group = await ActorGroup.create(
        "reference",
        Worker,
        2,
        session=cluster,
        args_for_rank=lambda rank: ((rank,), {}),
        placement=[Slot(second, bundle, 1.0, 0.0) for bundle in range(2)],
        deadline_s=60,
        log_dir=tmp_path,
    )
    assert {member.node for member in group.members} == {other_node}
    (child, _) = await group.call("start_child", what="children", deadline_s=30)
    pid = group.members[1].pid
    asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)
    with pytest.raises(ActorFailed) as failed:
        await cluster.supervisor.guard(group.call_rank(0, "sleep", 300, what="scoring", deadline_s=600))
    assert (failed.value.role, failed.value.rank, failed.value.pid) == ("reference", 1, pid)
    assert "constructed rank 1" in str(failed.value)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert failed.value.signal == (signal.SIGKILL if release >= (6, 15) else None)
    await group.close()
    assert not alive(child)
