"""The pool of worker processes: what hangs, crashes or is killed costs its own call and is never a silent 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.config.schema import RewardConfig
from rlhf.rewards import RewardError, RewardInput, dump_functions
from rlhf.rewards.pool import RewardPool
from rlhf.rewards.types import SampleScore

FUNCTIONS = """
import os, signal, subprocess, threading, time

def right(samples):
    return [float(s.response == s.fields["answer"]) for s in samples]

def spin(samples):
    while any(s.response == "bad" for s in samples):
        pass
    return [1.0] * len(samples)

def stubborn(samples):
    while any(s.response == "bad" for s in samples):
        try:
            time.sleep(3600)
        except BaseException:
            pass
    return [1.0] * len(samples)

def count(samples):
    with open(samples[0].fields["calls"], "a") as file:
        file.write(".")

def leave(samples):
    if any(s.response == "bad" for s in samples):
        count(samples)
        os._exit(3)
    return [1.0] * len(samples)

def sys_exit(samples):
    raise SystemExit("bye")

def killed(samples):
    count(samples)
    os.kill(os.getpid(), signal.SIGKILL)

def waits_for_a_kill(samples):
    file = samples[0].fields["file"]
    if os.path.exists(file):
        return [float(s.response) for s in samples]
    with open(file + ".new", "w") as new:
        new.write(str(os.getpid()))
    os.rename(file + ".new", file)
    time.sleep(3600)

def fork_and_hang(samples):
    if os.fork() == 0:
        time.sleep(3600)
    with open(samples[0].fields["file"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)

def half(samples):
    return [1.0 if i % 2 == 0 else None for i in range(len(samples))]

def too_few(samples):
    return [1.0]

def with_alarm(samples):
    assert threading.current_thread() is threading.main_thread()
    scores = []
    for sample in samples:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        scores.append(float(sample.response.endswith("5")))
        signal.alarm(0)
    return scores

def environment(samples):
    import sys
    heavy = [m for m in ("torch", "ray", "vllm", "pytest") if m in sys.modules]
    assert not heavy, heavy
    return [float(os.getpid())] * len(samples)

def slow_then_own_name(samples):
    time.sleep(samples[0].fields["sleep"])
    return [float(s.response) for s in samples]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "mine.py").write_text(FUNCTIONS)
    (folder / "slow_import.py").write_text("import time\ntime.sleep(2.0)\ndef f(samples):\n    return [1.0]\n")
    return folder


Make = Callable[..., RewardPool]


@pytest.fixture
def make(folder: Path) -> Any:
    """Start pools of functions of the file above, and close them."""
    pools: list[RewardPool] = []

    def start(*names: str, extra: dict[str, bytes] | None = None, **settings: Any) -> RewardPool:
        functions = [{"name": name if ":" in name else f"mine.py:{name}"} for name in names]
        config = RewardConfig.model_validate({"functions": functions, **settings})
        pools.append(RewardPool(config, extra, str(folder)))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def group(*responses: str, **fields: Any) -> list[RewardInput]:
    return [RewardInput(prompt="p", response=response, fields=fields) for response in responses]


def rewards(scores: Sequence[SampleScore]) -> list[float | None]:
    return [score.reward for score in scores]


async def test_scores_keep_the_order_of_the_samples(make: Make) -> None:
    pool = make("right")
    scores = await pool.score(group("5", "4", "5", answer="5"), prompt_id="p1")
    assert rewards(scores) == [1.0, 0.0, 1.0]
    assert scores[0].by_function == {"mine.py:right": 1.0}


@pytest.mark.parametrize("name", ["spin", "stubborn"])
async def test_a_function_that_never_returns_is_killed_and_the_next_call_works(make: Make, name: str) -> None:
    pool = make(name, timeout_s=0.3, on_error="drop")
    (score,) = await pool.score(group("bad"), prompt_id="p1")
    assert score.reward is None
    assert score.error is not None
    assert f"'mine.py:{name}', prompt 'p1'" in score.error
    assert "reward.timeout_s = 0.3 s" in score.error
    assert rewards(await pool.score(group("good"), prompt_id="p2")) == [1.0]


async def test_eight_hanging_calls_in_a_row_do_not_exhaust_the_pool(make: Make) -> None:
    pool = make("spin", timeout_s=0.2, on_error=-1.0, workers=2)
    hanging = [pool.score(group("bad"), prompt_id=f"p{i}") for i in range(8)]
    scores = await asyncio.gather(*hanging, pool.score(group("good"), prompt_id="last"))
    assert [rewards(one) for one in scores] == [[-1.0]] * 8 + [[1.0]]


async def test_what_a_killed_function_started_is_killed_too(make: Make, tmp_path: Path) -> None:
    pool = make("fork_and_hang", timeout_s=1.0, on_error="drop")
    (score,) = await pool.score(group("x", file=str(tmp_path / "pid")), prompt_id="p1")
    assert score.error is not None
    process_group = int((tmp_path / "pid").read_text())
    group_members = [process for process in psutil.process_iter() if is_in_group(process, process_group)]
    _, alive = psutil.wait_procs(group_members, timeout=20)
    assert alive == []


def is_in_group(process: psutil.Process, process_group: int) -> bool:
    with suppress(psutil.Error, ProcessLookupError):
        return os.getpgid(process.pid) == process_group and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_function_that_ends_its_process_is_an_error_that_says_how(make: Make, tmp_path: Path) -> None:
    pool = make("leave", on_error="drop")
    calls = tmp_path / "calls"
    (score,) = await pool.score(group("bad", calls=str(calls)), prompt_id="p1")
    assert score.error is not None
    assert "ended its worker process, which exited with code 3" in score.error
    assert calls.read_text() == "."
    assert rewards(await pool.score(group("good"), prompt_id="p2")) == [1.0]


def kill_what_writes(file: Path) -> None:
    """Wait for a file with a pid in it, and kill that process."""
    while not file.exists():
        time.sleep(0.02)
    os.kill(int(file.read_text()), signal.SIGKILL)


async def test_a_worker_killed_from_outside_costs_no_reward(make: Make, tmp_path: Path) -> None:
    pool = make("waits_for_a_kill", timeout_s=3600)
    file = tmp_path / "pid"
    call = asyncio.ensure_future(pool.score(group("5", "7", file=str(file)), prompt_id="p1"))
    await asyncio.to_thread(kill_what_writes, file)
    assert rewards(await call) == [5.0, 7.0]


async def test_a_function_that_kills_its_worker_again_is_an_error_that_names_the_signal(
    make: Make, tmp_path: Path
) -> None:
    pool = make("killed", on_error="drop")
    calls = tmp_path / "calls"
    (score,) = await pool.score(group("x", calls=str(calls)), prompt_id="p1")
    assert score.error is not None
    assert "was killed by SIGKILL" in score.error
    assert score.error.endswith("when its call was made once more")
    assert calls.read_text() == ".."


async def test_a_worker_killed_between_calls_is_replaced_without_an_error(make: Make) -> None:
    pool = make("right")
    for _ in range(3):
        assert rewards(await pool.score(group("5", answer="5"), prompt_id="p1")) == [1.0]
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)


async def test_sys_exit_is_an_exception_like_others(make: Make) -> None:
    pool = make("sys_exit", on_error="drop")
    (pid,) = pool.worker_pids
    (score,) = await pool.score(group("x"), prompt_id="p1")
    assert score.error is not None
    assert score.error.endswith("SystemExit: bye")
    assert pool.worker_pids == [pid]


async def test_error_policy_raise_names_function_prompt_and_count(make: Make) -> None:
    pool = make("too_few")
    with pytest.raises(RewardError, match=r"'mine.py:too_few', prompt 'p9', all 2 samples: returned 1 scores"):
        await pool.score(group("a", "b"), prompt_id="p9")


async def test_none_of_one_of_two_functions_is_left_out_of_the_sum(make: Make) -> None:
    pool = make("half", "right")
    assert rewards(await pool.score(group("5", "5", answer="5"), prompt_id="p1")) == [2.0, 1.0]


async def test_verifiers_that_limit_themselves_with_signals_work(make: Make) -> None:
    pool = make("with_alarm")
    assert rewards(await pool.score(group(r"it is 5", "4"), prompt_id="p1")) == [1.0, 0.0]


async def test_workers_are_other_processes_without_the_heavy_packages(make: Make) -> None:
    pool = make("environment")
    (reward,) = rewards(await pool.score(group("x"), prompt_id="p1"))
    assert reward in pool.worker_pids
    assert reward != os.getpid()


async def test_the_time_a_worker_takes_to_boot_is_not_counted(make: Make) -> None:
    # Importing the file takes 2 s, which is more than the deadline of a call; so does importing it again after a kill.
    pool = make("slow_import.py:f", timeout_s=0.5)
    assert rewards(await pool.score(group("x"), prompt_id="p1")) == [1.0]
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    assert rewards(await pool.score(group("x"), prompt_id="p2")) == [1.0]


async def test_the_time_a_call_waits_for_a_worker_is_not_counted(make: Make) -> None:
    # Six calls of 0.4 s each on one worker: the last waits for 2 s, twice the deadline.
    pool = make("slow_then_own_name", timeout_s=1.0)
    calls = [pool.score(group(str(i), sleep=0.4), prompt_id=f"p{i}") for i in range(6)]
    assert [rewards(one) for one in await asyncio.gather(*calls)] == [[float(i)] for i in range(6)]


async def test_groups_scored_together_keep_their_own_scores(make: Make) -> None:
    # 7 groups on 2 workers, the first the slowest: results come in another order than they were asked for.
    pool = make("slow_then_own_name", "right", workers=2)
    calls = [
        pool.score(group(f"{i}", f"{i}0", answer=f"{i}0", sleep=0.5 if i == 0 else 0.01), prompt_id=f"p{i}")
        for i in range(1, 7)
    ]
    # The sum for group i: i + 0 for the wrong response, 10 i + 1 for the right one.
    assert [rewards(one) for one in await asyncio.gather(*calls)] == [[i, 10 * i + 1] for i in range(1, 7)]


async def test_functions_from_python_travel_with_what_they_close_over(make: Make) -> None:
    bonus = 3.0
    pool = make("half", extra=dump_functions({"closure": lambda samples: [bonus for _ in samples]}))
    scores = await pool.score(group("a", "b"), prompt_id="p1")
    assert rewards(scores) == [4.0, 3.0]
    assert scores[1].by_function == {"mine.py:half": None, "closure": 3.0}


async def test_functions_of_installed_modules_are_found_by_name(make: Make) -> None:
    pool = make("rlhf.rewards.builtin:exact_match")
    assert rewards(await pool.score(group("5", "4", answer="5"), prompt_id="p1")) == [1.0, 0.0]


def test_a_function_that_cannot_be_loaded_ends_the_start_with_its_own_error(make: Make, folder: Path) -> None:
    (folder / "broken.py").write_text("import this_is_not_installed\n")
    with pytest.raises(RewardError, match=r"'broken.py:f' can't be loaded(.|\n)*this_is_not_installed"):
        make("broken.py:f")


async def test_close_in_the_middle_of_a_call_ends_it_and_all_processes(make: Make) -> None:
    pool = make("stubborn", timeout_s=3600, workers=2)
    pids = pool.worker_pids
    call = asyncio.ensure_future(pool.score(group("bad"), prompt_id="p1"))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(pool.close)
    with pytest.raises(RewardError, match="closed"):
        await call
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RewardError, match="not running"):
        await pool.score(group("bad"), prompt_id="p2")


def test_workers_die_with_a_parent_that_was_killed(folder: Path) -> None:
    # The parent is killed while its worker is inside a function that never returns, so only the kernel can end it.
    code = f"""
import asyncio, sys
from rlhf.config.schema import RewardConfig
from rlhf.rewards import RewardInput
from rlhf.rewards.pool import RewardPool
config = RewardConfig.model_validate({{"functions": [{{"name": "mine.py:stubborn"}}], "timeout_s": 3600}})
pool = RewardPool(config, None, {str(folder)!r})
pool.start()
print(pool.worker_pids[0], flush=True)
asyncio.run(pool.score([RewardInput(prompt="", response="bad")], prompt_id="p"))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)
        assert worker.is_running()
    finally:
        parent.kill()
        parent.wait(20)
    worker.wait(20)
