"""A process's random streams follow from what they are seeded with."""

from __future__ import annotations

import random

import numpy as np
import torch

from rlhf.models.distributed import seed_random_streams


def draws(*key: str | int) -> tuple[float, float, float]:
    """One number of each stream."""
    seed_random_streams(*key)
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_streams_are_a_function_of_the_key_alone() -> None:
    first = draws(1, "policy", 0)
    assert draws(1, "policy", 1) != first
    assert draws(1, "policy", 0) == first


def test_runs_roles_and_ranks_have_streams_of_their_own() -> None:
    keys = [(seed, role, rank) for seed in (1, 2) for role in ("policy", "critic") for rank in (0, 1)]
    for stream in zip(*(draws(*key) for key in keys), strict=True):
        assert len(set(stream)) == len(keys)
