"""The reference scorer on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.scorers.reference import ReferenceScorer
from rlhf.tracking.spans import recorder
from rlhf.trajectories import Columns
from tests.integration.scorer_ranks import make_config, make_samples


@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
@pytest.mark.parametrize("masked", [False, True])
def test_log_probs_are_at_the_sampling_temperature_whatever_the_micro_batch(
    tiny_untied: Path, max_tokens: int, masked: bool
) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(
        tiny_untied,
        rollout={"sampling": {"temperature": 0.5}},
        policy={"max_tokens_per_microbatch": max_tokens},
    )
    recorder.drain()
    scorer = ReferenceScorer(config, 0, 1)
    scorer.setup()
    samples = make_samples(masked=masked)
    (spans, scored_ids), scored = scorer.score(samples)
    scorer.close()
    assert [span.name for span in spans] == ["reference/setup", "reference/score"]
    model = AutoModelForCausalLM.from_pretrained(tiny_untied)
    assert scored.keys() == {sample.sample_id for sample in samples} == set(scored_ids)
    for sample in samples:
        assert isinstance(sample.columns, Columns)
        ids = torch.from_numpy(sample.columns.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1] / 0.5
        mask = sample.columns.sampling_mask
        if mask is not None:
            for token in range(sample.response_tokens):
                allowed = mask.token_ids[mask.offsets[token] : mask.offsets[token + 1]].astype(np.int64)
                row = logits[sample.prompt_tokens - 1 + token]
                row[np.setdiff1d(np.arange(104), allowed)] = -torch.inf
        expected = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None]).squeeze(1).numpy()
        values = scored[sample.sample_id]
        assert values.dtype == np.float32 and len(values) == sample.total_tokens
        assert np.isnan(values[: sample.prompt_tokens]).all()
        np.testing.assert_allclose(values[sample.prompt_tokens :], expected[sample.prompt_tokens - 1 :], atol=2e-5)


def test_a_replica_scores_all_that_it_is_given_whatever_its_rank(tiny_untied: Path) -> None:
    scored = []
    for rank in range(2):
        scorer = ReferenceScorer(make_config(tiny_untied), rank, 2)
        scorer.setup()
        scored.append(scorer.score(make_samples())[1])
    assert scored[0].keys() == scored[1].keys() == {sample.sample_id for sample in make_samples()}


def test_one_call_scores_nothing_when_there_is_nothing(tiny_untied: Path) -> None:
    scorer = ReferenceScorer(make_config(tiny_untied), 0, 1)
    scorer.setup()
    assert scorer.score([])[1] == {}


def test_a_sharded_scorer_needs_an_address_to_meet_at(tiny_untied: Path) -> None:
    scorer = ReferenceScorer(make_config(tiny_untied, reference={"sharded": True}), 0, 2)
    with pytest.raises(ValueError, match="the reference is sharded: its ranks need an address"):
        scorer.setup()
