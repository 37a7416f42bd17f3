"""The reward actor in a real Ray cluster: ids in by reference, texts to the functions, scores back in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rlhf.cluster.wait import get, wait, wait_all
from rlhf.config.schema import RewardConfig
from rlhf.rewards import RewardInput, ScoreResult, dump_functions
from rlhf.rewards.actor import RewardActor
from rlhf.trajectories import Columns, Prompt, Trajectory
from tests.tiny import make_tiny_tokenizer

DEADLINE_S = 120.0
FUNCTIONS = """
import json, os, signal, time

def record(samples):
    for s in samples:
        line = {"prompt": s.prompt, "response": s.response, "ids": s.response_ids, "answer": s.fields["answer"]}
        with open(s.fields["log"], "a") as log:
            log.write(json.dumps(line) + "\\n")
    time.sleep(samples[0].fields.get("sleep", 0))
    return [float(s.response == s.prompt[-1]) for s in samples]

def boxed_with_alarm(samples):
    signal.signal(signal.SIGALRM, lambda *_: None)  # raises anywhere but on the main thread
    signal.alarm(5)
    scores = [float(s.response.endswith("[5]")) for s in samples]
    signal.alarm(0)
    return scores
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ours = not ray.is_initialized()
    if ours:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if ours:
        ray.shutdown()


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ans>"]})
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def start(cluster: None, tokenizer_path: Path, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    actors: list[Any] = []

    def make(*names: str, extra: dict[str, Any] | None = None, **settings: Any) -> Any:
        config = RewardConfig.model_validate({"functions": [{"name": name} for name in names], **settings})
        remote = ray.remote(num_cpus=0, max_concurrency=100)(RewardActor)
        actors.append(remote.remote(config, str(tokenizer_path), dump_functions(extra or {}), str(tmp_path)))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


@ray.remote(num_cpus=0)
def columns_of(prompt_ids: list[int], response_ids: list[int]) -> Columns:
    """As an engine returns them: the result of a remote call, fetched by reference."""
    return Columns.from_completion(prompt_ids, response_ids, [-0.5] * len(response_ids), 0)


def trajectories(prompt: Prompt, group_id: int, responses: list[list[int]]) -> list[Trajectory]:
    return [
        Trajectory(
            prompt_id=prompt.prompt_id,
            group_id=group_id,
            sample_index=index,
            prompt_tokens=len(prompt.token_ids),
            response_tokens=len(ids),
            finish_reason="stop",
            weight_version=0,
            engine=0,
            columns=columns_of.remote(list(prompt.token_ids), ids),
        )
        for index, ids in enumerate(responses)
    ]


async def score(actor: Any, prompt: Prompt, group_id: int, responses: list[list[int]]) -> ScoreResult:
    reference = actor.score.remote(prompt, trajectories(prompt, group_id, responses))
    return await wait(reference, what="scores", deadline_s=DEADLINE_S)


def ids_of(path: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(path).encode(text, add_special_tokens=False))


async def test_special_tokens_are_left_out_of_the_text_and_kept_in_the_ids(
    start: Any, tokenizer_path: Path, tmp_path: Path
) -> None:
    import json

    log = tmp_path / "log"
    prompt = Prompt("p", "say 2", tuple(ids_of(tokenizer_path, "say 2")), {"answer": "2", "log": str(log)})
    response = ids_of(tokenizer_path, "<ans>2<eos><pad><pad>")
    assert len(response) == 5
    result = await score(start("mine.py:record"), prompt, 0, [response])
    assert [one.reward for one in result.scores] == [1.0]
    seen = json.loads(log.read_text())
    assert seen == {"prompt": "say 2", "response": "2", "ids": response, "answer": "2"}
    assert [(span.name, span.role) for span in result.spans] == [("score", "reward")]


async def test_groups_scored_at_once_get_their_own_prompts_and_answers(
    start: Any, tokenizer_path: Path, tmp_path: Path
) -> None:
    import json

    log = tmp_path / "log"
    actor = start("mine.py:record", workers=2)
    # 7 prompts "say 0" .. "say 6", each with the right digit and a wrong one; the first group is slow.
    prompts = [
        Prompt(f"p{i}", f"say {i}", (4 + i,), {"answer": i, "log": str(log), "sleep": 0.5 if i == 0 else 0})
        for i in range(7)
    ]
    calls = [score(actor, prompt, i, [[4 + i], [4 + (i + 1) % 10]]) for i, prompt in enumerate(prompts)]
    results = await asyncio.gather(*calls)
    assert [[one.reward for one in result.scores] for result in results] == [[1.0, 0.0]] * 7
    triples = {(s["prompt"], s["response"], s["answer"]) for s in map(json.loads, log.read_text().splitlines())}
    expected = {(f"say {i}", str(r), i) for i in range(7) for r in (i, i + 1)}
    assert triples == expected


async def test_a_verifier_that_uses_signals_scores_1_in_the_real_actor(start: Any, tokenizer_path: Path) -> None:
    actor = start("mine.py:boxed_with_alarm")
    prompt = Prompt("p", "2+3", (5,), {"answer": "5"})
    right, wrong = ids_of(tokenizer_path, "it is [5]"), ids_of(tokenizer_path, "it is [6]")
    result = await score(actor, prompt, 0, [right, wrong])
    assert [one.reward for one in result.scores] == [1.0, 0.0]


async def test_a_failed_reward_reaches_the_driver_with_function_prompt_and_sample(start: Any) -> None:
    def sometimes(samples: list[RewardInput]) -> list[float]:
        return [float("nan") if sample.response == "9" else 1.0 for sample in samples]

    actor = start("sometimes", extra={"sometimes": sometimes})
    prompt = Prompt("row-4", "x", (5,))
    with pytest.raises(Exception, match="'sometimes', prompt 'row-4', sample 1: returned the score nan"):
        await score(actor, prompt, 0, [[4], [13]])
    assert [one.reward for one in (await score(actor, prompt, 1, [[4]])).scores] == [1.0]


async def test_no_worker_is_left_when_the_actor_is_killed_or_closed(start: Any) -> None:
    killed, closed = start("exact_match", workers=2), start("exact_match")
    pids = await wait_all([killed.ping.remote(), closed.ping.remote()], what="pids", deadline_s=DEADLINE_S)
    assert os.getpid() not in pids
    workers = [psutil.Process(pid).children() for pid in pids]
    assert [len(children) for children in workers] == [2, 1]
    os.kill(pids[0], 9)
    get(closed.close.remote(), what="close", deadline_s=DEADLINE_S)
    _, alive = psutil.wait_procs([child for children in workers for child in children], timeout=20)
    assert alive == []
