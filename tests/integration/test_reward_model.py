"""The reward model scorer on a real model: equal to transformers on each sequence alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.batching import LearnerSample
from rlhf.scorers.reward import RewardModelScorer
from rlhf.tracking.spans import recorder
from rlhf.trajectories import Columns
from tests.integration.scorer_ranks import make_config, make_sample, make_samples
from tests.tiny import EOS_ID, make_tiny_reward_model


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its padding token is its end-of-sequence token, as in many published models.
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward") / "model", pad_id=EOS_ID)


def scorer(policy: Path, reward: Path, max_tokens: int = 60) -> RewardModelScorer:
    config = make_config(policy, reward, policy={"max_tokens_per_microbatch": max_tokens})
    started = RewardModelScorer(config, 0, 1)
    started.setup()
    return started


def alone(folder: Path, sample: LearnerSample) -> float:
    """transformers' score of the sequence alone, at its last token."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert isinstance(sample.columns, Columns)
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(sample.columns.token_ids.astype(np.int64))[None]).last_hidden_state
        return float(model.score(hidden)[0, -1, 0])


@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
def test_scores_are_those_of_each_sequence_alone_whatever_the_micro_batch(
    tiny_untied: Path, reward_folder: Path, max_tokens: int
) -> None:
    samples = make_samples()
    recorder.drain()
    started = scorer(tiny_untied, reward_folder, max_tokens)
    (spans, ids), scored = started.score(samples)
    started.close()
    assert set(ids) == set(scored)
    assert [span.name for span in spans] == ["reward_model/setup", "reward_model/score"]
    assert scored == pytest.approx({s.sample_id: alone(reward_folder, s) for s in samples}, abs=1e-5)
    assert all(isinstance(score, float) for score in scored.values())


def test_the_last_real_token_is_read_also_where_padding_and_end_of_sequence_are_one_token(
    tiny_untied: Path, reward_folder: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    # [5, 76, 5 | 84, 7, 2, 2] ends in two <eos>, beside a longer sample, so that padding follows it.
    samples = [
        make_sample(0, [5, 76, 5], [84, 7, EOS_ID, EOS_ID], None),
        make_sample(4, [9] * 8, [7] * 4, None),
        make_sample(8, [5, EOS_ID, 76], [84], None),
    ]
    _, scored = scorer(tiny_untied, reward_folder).score(samples)
    assert scored == pytest.approx({s.sample_id: alone(reward_folder, s) for s in samples}, abs=1e-5)
    # transformers' own pooling goes by ids and stops at the 7, so this test could tell.
    model = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    assert isinstance(samples[0].columns, Columns)
    pooled = model(torch.from_numpy(samples[0].columns.token_ids.astype(np.int64))[None]).logits.item()
    assert abs(pooled - scored["0-0"]) > 1e-3


def test_nothing_is_scored_when_there_is_nothing(tiny_untied: Path, reward_folder: Path) -> None:
    assert scorer(tiny_untied, reward_folder).score([])[1] == {}


def test_a_run_without_a_reward_model_has_no_scorer(tiny_untied: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.model is absent"):
        RewardModelScorer(make_config(tiny_untied), 0, 1)


def test_a_plain_language_model_is_refused_with_its_path_and_the_remedy(tiny_untied: Path) -> None:
    started = RewardModelScorer(make_config(tiny_untied, tiny_untied), 0, 1)
    with pytest.raises(ValueError, match=r"lacks score\.weight, which would be random\. Give a sequence") as error:
        started.setup()
    assert str(tiny_untied) in str(error.value)
