"""Fixtures that start something heavy once for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.integration.engines import Engine


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster for one test module."""
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def untied_engine(ray_cluster: None, tiny_untied: Path) -> Engine:
    """A float32 engine of the untied tiny model."""
    return Engine(tiny_untied, index=0)


@pytest.fixture(scope="module")
def tied_engine(ray_cluster: None, tiny_tied: Path) -> Engine:
    """A float32 engine of the tied tiny model."""
    return Engine(tiny_tied, index=1)
