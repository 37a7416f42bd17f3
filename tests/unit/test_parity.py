"""The parity probe's arithmetic."""

import numpy as np
import pytest

from rlhf.trainers.parity import ParityError, compare_logprobs
from rlhf.trajectories import Columns


def columns(logprobs):
    return {"0-0": Columns.from_completion((5, 76), [11] * len(logprobs), logprobs, 0)}


def trainer(logprobs):
    return {"0-0": np.array([np.nan, np.nan, *logprobs], dtype=np.float32)}


ENGINE = [-1.0, -2.0, -0.5, -3.0, -0.1, -1.5, -2.5, -0.7]


def test_equal_logprobs_pass_and_the_prompts_nans_do_not_matter():
    parity = compare_logprobs(columns(ENGINE), trainer(ENGINE))
    assert (parity.max_abs, parity.mean_abs, parity.tokens) == (0.0, 0.0, 8)
    parity.check("float32")


def test_the_largest_and_the_mean_difference_are_reported_with_the_place():
    # Differences: 0.25 at the second sampled token (index 3 of the sample), else 0; the mean over 8 is 0.03125.
    parity = compare_logprobs(columns(ENGINE), trainer([-1.0, -2.25, *ENGINE[2:]]))
    assert parity.max_abs == pytest.approx(0.25)
    assert parity.mean_abs == pytest.approx(0.03125)
    assert parity.worst == "sample 0-0, token 3"


def test_logprobs_shifted_by_one_token_are_refused():
    shifted = compare_logprobs(columns(ENGINE), trainer(ENGINE[1:] + ENGINE[:1]))
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ParityError, match="nats"):
            shifted.check(dtype)


def test_bounds_are_those_of_the_dtype():
    near = compare_logprobs(columns(ENGINE), trainer([x + 2e-4 for x in ENGINE]))
    near.check("bfloat16")
    with pytest.raises(ParityError, match=r"float32 allows 0\.0001"):
        near.check("float32")


def test_a_nan_never_passes():
    broken = compare_logprobs(columns(ENGINE), trainer([*ENGINE[:3], float("nan"), *ENGINE[4:]]))
    with pytest.raises(ParityError):
        broken.check("bfloat16")


def test_a_sample_without_trainer_logprobs_is_an_error():
    with pytest.raises(ParityError, match="0-0"):
        compare_logprobs(columns(ENGINE), {})
