"""The weight sync and the engine, on real vLLM: what arrives is what was sent, or nobody serves it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoTokenizer

from rlhf.rollout.types import GenerationRequest, Sampling
from rlhf.trainers.parity import ParityError
from rlhf.weights.endpoint import Declared
from rlhf.weights.gloo_sender import _Transfer
from rlhf.weights.receipts import SyncFailed
from rlhf.weights.source import LearnerSource
from tests.integration.engines import Engine, Trainer, sync
from tests.tiny import EOS_ID

PROMPT = [5, 76, 5, 84]  # "1+1="
LONG_PROMPT = [4 + i % 40 for i in range(150)]


@pytest.fixture(scope="module", params=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tiny_untied: Path, tiny_tied: Path) -> SimpleNamespace:
    """A trainer and its engine, joined; before the first sync the engine has dummy weights."""
    engine: Engine = request.getfixturevalue(f"{request.param}_engine")
    trainer = Trainer(tiny_tied if request.param == "tied" else tiny_untied)
    trainer.join([engine.handle])
    return SimpleNamespace(engine=engine, trainer=trainer)


@pytest.fixture
def synced(pair: SimpleNamespace) -> SimpleNamespace:
    """The pair with weights that just moved and were synced."""
    pair.trainer.move()
    pair.report = sync(pair.trainer, 7)
    return pair


def test_an_engine_without_committed_weights_refuses_to_serve(pair):
    with pytest.raises(ray.exceptions.RayTaskError, match="no committed weights"):
        pair.engine.generate(PROMPT)


def test_moved_weights_reach_every_tensor_of_an_engine_that_started_with_dummy_weights(pair):
    for version in range(2):
        pair.trainer.move()
        report = sync(pair.trainer, version)
        pair.engine.parity(pair.trainer, PROMPT).check("float32")
        sent = sum(p.numel() * 4 for _, p in pair.trainer.named_parameters_for_sync())
        assert (report.version, report.bytes) == (version, sent)


def test_a_skipped_sync_fails_the_parity_probe(synced):
    synced.trainer.move()
    with pytest.raises(ParityError):
        synced.engine.parity(synced.trainer, PROMPT).check("float32")
    with pytest.raises(ParityError):
        synced.engine.parity(synced.trainer, PROMPT).check("bfloat16")


def test_tokens_carry_the_version_that_produced_them(synced):
    header, columns = synced.engine.generate(PROMPT)
    assert header.weight_version == 7
    assert columns.weight_versions.tolist() == [-1] * 4 + [7] * header.response_tokens


def test_a_prompt_seen_before_a_sync_is_not_answered_from_old_kv(synced):
    synced.engine.generate(LONG_PROMPT)
    synced.trainer.move()
    sync(synced.trainer, 8)
    for prompt in (LONG_PROMPT, LONG_PROMPT[::-1]):
        synced.engine.parity(synced.trainer, prompt).check("float32")


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_those_of_the_sampled_distribution(synced, temperature):
    synced.engine.parity(synced.trainer, PROMPT, temperature=temperature).check("float32")


def broken_sync(pair, monkeypatch, declared, change):
    """A sync that declares other tensors and sends what `change` makes of the source's; returns the error."""
    original = LearnerSource.parameters
    monkeypatch.setattr(pair.trainer.sender, "_declared", tuple(declared))
    monkeypatch.setattr(LearnerSource, "parameters", lambda self: change(original(self)))
    with pytest.raises(SyncFailed) as caught:
        sync(pair.trainer, 9)
    monkeypatch.undo()
    assert caught.value.engines == {0}
    return str(caught.value)


def serves_again(pair):
    """After a failed sync nobody serves, and the next whole one is good."""
    with pytest.raises(ray.exceptions.RayTaskError, match="no committed weights"):
        pair.engine.generate(PROMPT)
    sync(pair.trainer, 10)
    pair.engine.parity(pair.trainer, PROMPT).check("float32")


def test_a_dropped_tensor_is_found_before_anyone_is_served(synced, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    declared = [d for d in synced.trainer.sender._declared if d.name != name]
    message = broken_sync(synced, monkeypatch, declared, lambda pairs: ((n, t) for n, t in pairs if n != name))
    # Half of a merged parameter: vLLM's own loader is content with it.
    assert "gate_up_proj" in message
    serves_again(synced)


def test_a_tensor_of_the_wrong_shape_fails_the_sync_and_the_next_one_succeeds(synced, monkeypatch):
    name = "model.layers.1.self_attn.o_proj.weight"
    declared = [
        replace(d, shape=(d.shape[0] // 2, *d.shape[1:])) if d.name == name else d
        for d in synced.trainer.sender._declared
    ]
    broken_sync(
        synced,
        monkeypatch,
        declared,
        lambda pairs: ((n, t[: len(t) // 2] if n == name else t) for n, t in pairs),
    )
    serves_again(synced)


def test_a_bit_flipped_on_the_way_is_found_by_the_receipt(synced, monkeypatch):
    def flipped(self, bucket, buffer):
        for slot in bucket.slots:
            if slot.name == "model.norm.weight":
                # A copy: what is on the wire stays as it is, and the sender's checksum is of other bytes.
                buffer = buffer.clone()
                slot.view(buffer).view(torch.int32)[3] ^= 1
        original(self, bucket, buffer)

    original = _Transfer._check
    monkeypatch.setattr(_Transfer, "_check", flipped)
    with pytest.raises(SyncFailed, match=r"engine 0 rank 0 .*other bytes \(model\.norm\.weight\)"):
        sync(synced.trainer, 9)
    monkeypatch.undo()
    serves_again(synced)


def test_what_an_engine_cannot_load_is_found_by_the_dry_run_and_leaves_the_engine_as_it_was(synced):
    declared = synced.trainer.sender._declared

    def problem(changed):
        ray.get(synced.engine.handle.begin_sync.remote("drain"), timeout=60)
        return ray.get(synced.engine.handle.weight_disagreements.remote(tuple(changed)), timeout=60)[0]

    assert problem(declared) is None
    assert "up_proj" in problem(d for d in declared if "layers.1.mlp.up_proj" not in d.name)
    assert "embed_tokens" in problem(d for d in declared if "embed_tokens" not in d.name)
    wrong = [replace(d, shape=(7, *d.shape[1:])) if "layers.0.mlp.down_proj" in d.name else d for d in declared]
    assert "model.layers.0.mlp.down_proj.weight [7, 256] can't be loaded" in problem(wrong)
    assert "model.nonsense" in problem([*declared, Declared("model.nonsense", "float32", (1,))])
    assert "dtype torch.float32" in problem(replace(d, dtype="bfloat16") for d in declared)
    # In a tied model as well, where the head has no parameter of its own but a packed copy.
    assert "lm_head" in problem(d for d in declared if d.name != "lm_head.weight")
    # Nothing was loaded: it would serve the weights of the sync before.
    ray.get(synced.engine.handle.commit_sync.remote(7), timeout=60)
    synced.engine.parity(synced.trainer, PROMPT).check("float32")


def test_a_seed_repeats_a_sample_and_another_seed_does_not(synced):
    first, again, other = (synced.engine.generate(PROMPT, seed=s, new=16)[1].token_ids for s in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_response_cut_at_its_limit_keeps_exactly_its_sampled_tokens(synced):
    for seed in range(20):
        header, columns = synced.engine.generate(PROMPT, seed=seed, new=3)
        sampled = columns.token_ids[columns.loss_mask]
        assert len(sampled) == header.response_tokens <= 3
        assert np.isfinite(columns.logprobs[columns.loss_mask]).all()
        assert header.finish_reason == ("stop" if sampled[-1] == EOS_ID else "length")


def test_a_stop_strings_tokens_stay_in_the_ids_that_are_trained_on(synced):
    _, free = synced.engine.generate(PROMPT, seed=5, new=8)
    sampled = free.token_ids[free.loss_mask].tolist()
    stop = AutoTokenizer.from_pretrained(synced.trainer.model.name_or_path).decode([sampled[1]])
    header, stopped = synced.engine.generate(PROMPT, seed=5, new=8, stop=(stop,))
    cut = sampled.index(sampled[1]) + 1
    assert stopped.token_ids[stopped.loss_mask].tolist() == sampled[:cut]
    assert header.finish_reason == "stop"


@pytest.mark.parametrize("prompt", [[], [5000], [5] * 256])
def test_a_prompt_the_engine_cannot_take_is_an_error_and_the_engine_lives(synced, prompt):
    with pytest.raises(ray.exceptions.RayTaskError):
        synced.engine.generate(prompt)
    assert synced.engine.generate(PROMPT)[0].response_tokens > 0


def test_seeded_prompts_that_do_not_fit_into_one_pass_together_are_all_answered(synced):
    # 40 different prompts of 120 tokens: 4,800 for passes of 2,048.
    generator = np.random.default_rng(0)
    sampling = Sampling(1.0, 1.0, -1, (), 4)
    requests = [
        GenerationRequest(f"many-{i}", tuple(generator.integers(4, 104, 120).tolist()), sampling, seed=i)
        for i in range(40)
    ]
    pending = [synced.engine.handle.generate.options(num_returns=2).remote(request) for request in requests]
    headers = ray.get([header for header, _ in pending], timeout=120)
    assert all(header.response_tokens > 0 and header.finish_reason in ("stop", "length") for header in headers)


def test_a_killed_engine_core_is_named_with_pid_and_signal(synced):
    # The last test of this module for each engine: the engine is gone after it.
    pid = synced.engine.core_pid()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with pytest.raises(ray.exceptions.RayTaskError, match=rf"pid {pid}\): killed by signal 9"):
        while time.monotonic() < deadline:
            synced.engine.generate(PROMPT)
