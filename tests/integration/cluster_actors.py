"""Plain classes that the cluster tests put into actors, and the driver that they run in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.model_shape import ModelShape, ModelShapes
from rlhf.cluster.session import Session, open_session
from rlhf.config import Config, config_from_dict

SHAPE = ModelShapes(
    ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocab=10, tied=True)
)


def config(ranks: int = 2, engines: int = 1) -> Config:
    """A run of `ranks` learners and `engines` engines; nothing of it but the placement is used."""
    return config_from_dict(
        {
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "reasoning_gym"}]},
            "policy": {"ranks": ranks},
            "rollout": {"engines": engines},
        },
        check_files=False,
    )


class Worker:
    """A class without coroutines."""

    def __init__(self, rank: int, fate: str = "") -> None:
        self.rank = rank
        self.thread = threading.get_ident()
        print(f"constructed rank {rank}")
        if fate == "raise":
            raise KeyError("no such weights")
        if fate == "exit":
            os._exit(3)

    def whoami(self) -> tuple[int, str | None, bool]:
        """Rank, an environment variable, and whether this is the constructor's thread."""
        return self.rank, os.environ.get("RLHF_TEST_FLAG"), self.thread == threading.get_ident()

    def sleep(self, seconds: float) -> None:
        """Be busy."""
        time.sleep(seconds)

    def fail_at(self, rank: int) -> None:
        """Raise at one rank, be busy at the others."""
        if self.rank == rank:
            raise ValueError("loss is NaN")
        time.sleep(60)

    def fail_when_gone(self, pid: int) -> None:
        """What a collective does when a peer dies: raise at once, without knowing why."""
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        raise ConnectionError("connection closed by peer")

    def start_child(self) -> int:
        """Start a process that doesn't watch its parent; its pid."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True).pid


class AsyncWorker:
    """A class with coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.arrived = 0
        self.all_here = asyncio.Event()

    async def meet(self, count: int) -> bool:
        """Return when `count` calls are in here together."""
        self.arrived += 1
        if self.arrived == count:
            self.all_here.set()
        await self.all_here.wait()
        return self.loop is asyncio.get_running_loop()

    async def pair(self) -> tuple[str, list[int]]:
        """A header and its columns."""
        return "header", [1, 2, 3]


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped by its new parent doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def workers(session: Session, log_dir: Path | None = None, **fates: str) -> ActorGroup:
    """Two workers in the policy's slots; `fates` by rank, as `rank0="raise"`."""
    return await ActorGroup.create(
        "policy",
        Worker,
        2,
        session=session,
        args_for_rank=lambda rank: ((rank,), {"fate": fates.get(f"rank{rank}", "")}),
        placement=session.placement.slots["policy"],
        env={"RLHF_TEST_FLAG": "set"},
        deadline_s=60,
        log_dir=log_dir,
    )


async def _drive(ending: str, log_dir: Path) -> None:
    async with open_session(config(), SHAPE) as session:
        await session.placement.reserve(session.needs, 60)
        group = await workers(session, log_dir)
        children = await group.call("start_child", what="children", deadline_s=30)
        print("READY", os.getpid(), *children, flush=True)
        if ending == "raise":
            raise RuntimeError("the driver's own error")
        if ending == "wait":
            await session.supervisor.guard(group.call("sleep", 300, what="work", deadline_s=600))


async def _join(ranks: int) -> None:
    async with open_session(config(ranks), SHAPE, say=print) as session:
        await session.placement.reserve(session.needs, 60)
        print(await (await workers(session)).call("whoami", what="whoami", deadline_s=30), flush=True)


def main(arguments: list[str]) -> Any:
    """`drive ENDING LOG_DIR` or `join RANKS`."""
    from rlhf.cluster.preflight import Refused

    try:
        if arguments[0] == "join":
            asyncio.run(_join(int(arguments[1])))
        else:
            asyncio.run(_drive(arguments[1], Path(arguments[2])))
    except Refused as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    # As a module, so that Ray pickles the classes by name.
    from tests.integration.cluster_actors import main as imported_main

    sys.exit(imported_main(sys.argv[1:]))
