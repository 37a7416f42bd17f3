"""The reference scorer on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.scorers.reference import ReferenceScorer
from tests.integration.learner_ranks import make_config, make_samples


@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
def test_log_probs_are_at_the_sampling_temperature_whatever_the_micro_batch(tiny_untied: Path, max_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(
        tiny_untied,
        rollout={"sampling": {"temperature": 0.5}},
        policy={"max_tokens_per_microbatch": max_tokens},
    )
    scorer = ReferenceScorer(config)
    scorer.setup()
    samples = make_samples()
    scored = scorer.logprobs(samples)
    scorer.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_untied)
    assert scored.keys() == {sample.sample_id for sample in samples}
    for sample in samples:
        ids = torch.from_numpy(sample.columns.token_ids.astype(np.int64))  # type: ignore[union-attr]
        with torch.no_grad():
            everything = torch.log_softmax(model(ids[None]).logits[0] / 0.5, dim=-1)
        expected = everything[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
        values = scored[sample.sample_id]
        assert values.dtype == np.float32 and len(values) == sample.total_tokens
        assert np.isnan(values[: sample.prompt_tokens]).all()
        np.testing.assert_allclose(values[sample.prompt_tokens :], expected[sample.prompt_tokens - 1 :], atol=2e-5)


def test_one_call_scores_nothing_when_there_is_nothing(tiny_untied: Path) -> None:
    scorer = ReferenceScorer(make_config(tiny_untied))
    scorer.setup()
    assert scorer.logprobs([]) == {}
