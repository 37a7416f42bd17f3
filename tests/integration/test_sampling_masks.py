"""Top-k, top-p and a minimum length on real vLLM: the mask that comes back is what the trainer has to replay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.trajectories import SamplingMask
from tests.integration.engines import Engine, Trainer, sync
from tests.tiny import EOS_ID, VOCABULARY_SIZE, make_tiny_model

PROMPT = [5, 76, 5, 84]  # "1+1="
OTHER_STOP_ID = 4  # '0', which only the generation config names as a token that ends a response
SEEDS = range(8)
TOP_K, TOP_P, MIN_NEW = 8, 0.7, 4
CASES = {
    "top-k": {"top_k": 5},
    "top-k, top-p": {"top_k": TOP_K, "top_p": TOP_P},
    "minimum": {"min_new": MIN_NEW},
    "all": {"top_k": TOP_K, "top_p": TOP_P, "min_new": MIN_NEW, "temperature": 1.3},
    "k above vocabulary": {"top_k": VOCABULARY_SIZE + 1, "top_p": TOP_P},
}


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An engine and its trainer in sync; the model has two tokens that end a response, and likes both."""
    folder = make_tiny_model(tmp_path_factory.mktemp("masks"))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [EOS_ID, OTHER_STOP_ID]}))
    trainer = Trainer(folder)
    with torch.no_grad():
        logits, hidden = forward(trainer, PROMPT)
        # At the first place one logit is 2.5 above the highest, the other 2.
        direction, highest = hidden[-1] / hidden[-1].square().sum(), logits[-1].max()
        trainer.model.lm_head.weight[EOS_ID] = direction * (highest + 2.5)
        trainer.model.lm_head.weight[OTHER_STOP_ID] = direction * (highest + 2)
    engine = Engine(folder, index=2, max_logprobs=VOCABULARY_SIZE)
    trainer.join([engine.handle])
    sync(trainer, 1)
    return SimpleNamespace(engine=engine, trainer=trainer)


def forward(trainer: Trainer, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and last hidden states at each place."""
    with torch.no_grad():
        output = trainer.model(torch.tensor([ids]), output_hidden_states=True)
    return output.logits[0].float(), output.hidden_states[-1][0]


def samples(pair: SimpleNamespace, **limits: Any) -> list[SimpleNamespace]:
    """One response a seed: sampled ids, the engine's log-probs, the mask, and the trainer's logits at its R places."""
    found = []
    for seed in SEEDS:
        _, columns = pair.engine.generate(PROMPT, seed=seed, new=12, **limits)
        ids = torch.from_numpy(columns.token_ids[columns.loss_mask].astype(np.int64))
        logits = forward(pair.trainer, columns.token_ids.tolist())[0][len(PROMPT) - 1 : -1]
        found.append(
            SimpleNamespace(
                ids_R=ids,
                logprobs_R=torch.from_numpy(columns.logprobs[columns.loss_mask]),
                mask=columns.sampling_mask,
                logits_RV=logits / limits.get("temperature", 1.0),
            )
        )
    return found


def supports(mask: SamplingMask) -> torch.Tensor:
    """[R, V], True where a token could be sampled."""
    rows = len(mask.offsets) - 1
    listed = torch.zeros(rows, VOCABULARY_SIZE, dtype=torch.bool)
    for r in range(rows):
        listed[r, mask.token_ids[mask.offsets[r] : mask.offsets[r + 1]].tolist()] = True
    return listed if mask.allowed else ~listed


def picked(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_RV, dim=-1).gather(1, ids_R[:, None])[:, 0]


def expected_support(logits_RV: torch.Tensor, top_k: int = -1, top_p: float = 1.0, min_new: int = 0) -> torch.Tensor:
    """[R, V]: no stop id before the minimum, then the k likeliest, then of those the fewest that reach top_p."""
    logits_RV = logits_RV.clone()
    logits_RV[:min_new, [EOS_ID, OTHER_STOP_ID]] = -torch.inf
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True)
    if top_k > 0:
        sorted_RV[:, top_k:] = -torch.inf
    p_RV = sorted_RV.softmax(dim=-1)
    before_RV = p_RV.cumsum(dim=-1) - p_RV
    kept_RV = torch.isfinite(sorted_RV) & ((before_RV < top_p) | torch.tensor(top_p == 1.0))
    return torch.zeros_like(kept_RV).scatter(1, order_RV, kept_RV)


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_logprobs_are_the_engines_when_the_mask_is_replayed_and_are_not_without_it(pair, case):
    found = samples(pair, **CASES[case])
    replayed, plain = [], []
    for s in found:
        replayed.append(picked(s.logits_RV.masked_fill(~supports(s.mask), -torch.inf), s.ids_R) - s.logprobs_R)
        plain.append(picked(s.logits_RV, s.ids_R) - s.logprobs_R)
    # The distribution that was sampled from has the higher log-prob: it is spread over fewer tokens.
    assert torch.cat(replayed).abs().max() <= 1e-4
    assert torch.cat(plain).min() < -0.1


@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_the_support_by_definition_and_holds_every_sampled_token(pair, case):
    limits = {name: value for name, value in CASES[case].items() if name != "temperature"}
    for s in samples(pair, **CASES[case]):
        support = supports(s.mask)
        assert torch.equal(support, expected_support(s.logits_RV, **limits))
        assert support.gather(1, s.ids_R[:, None]).all()
        # float32 logits of this model don't tie.
        assert support.sum(dim=1).max() <= limits.get("top_k", VOCABULARY_SIZE)


@pytest.mark.parametrize("case", ["minimum", "all"])
def test_no_token_that_ends_a_response_is_sampled_before_the_minimum_length(pair, case):
    stops = torch.tensor([EOS_ID, OTHER_STOP_ID])
    limits = CASES[case]
    free = samples(pair, **{name: value for name, value in limits.items() if name != "min_new"})
    # Without the minimum both end responses early, so that their absence below says something.
    assert set(torch.cat([s.ids_R[:MIN_NEW] for s in free]).tolist()) >= set(stops.tolist())
    for s in samples(pair, **limits):
        assert len(s.ids_R) > MIN_NEW
        assert not torch.isin(s.ids_R[:MIN_NEW], stops).any()
        assert not supports(s.mask)[:MIN_NEW, stops].any()


def test_sampling_from_all_tokens_has_no_mask(pair):
    assert {s.mask for s in samples(pair)} == {None}


def test_a_greedy_evaluation_with_the_same_limits_runs_and_has_no_mask(pair):
    limits = CASES["all"] | {"temperature": 0.0}
    header, columns = pair.engine.generate(PROMPT, new=12, **limits)
    assert columns.sampling_mask is None
    assert header.response_tokens > MIN_NEW
