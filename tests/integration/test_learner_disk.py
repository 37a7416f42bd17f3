"""Optimizer state on a disk gives what it gives in the host's memory, bit for bit: one rank and two ranks over gloo.

Only with `--full`, since DeepSpeed compiles its asynchronous I/O for some minutes.
"""

from __future__ import annotations

import pytest
import torch

from tests.integration.test_learner import RUNS, Found, run_ranks
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's asynchronous I/O needs libaio's headers (Debian: libaio-dev), which aren't installed")
    folder = tmp_path_factory.mktemp("learner-disk")
    make_tiny_model(folder / "untied", hidden=512)
    return run_ranks("learner_disk_ranks", folder)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ["optimizer", "optimizer_and_parameters"])
def test_three_updates_give_the_same_weights_on_a_disk(found: Found, run: str, dtype: str, what: str) -> None:
    host, disk = (found[run][f"{what} {dtype} {to}"] for to in ("host", "disk"))
    for name in ("weights", "sent"):
        assert all(torch.equal(host[name][key], disk[name][key]) for key in host[name])
    # Masters and moments of the rank's share of 4.3 million parameters were there.
    assert disk["on disk"] > 12 * 4_300_000 // (2 if run != RUNS[0] else 1)
    # Steps that fail leave every bit, as in memory.
    assert "was not applied" in disk["gradient overflows"] and "not finite" in disk["NaN advantage"]
    assert disk["unmoved"]


@pytest.mark.parametrize("run", RUNS)
def test_nothing_is_left_of_a_learner_that_was_closed(found: Found, run: str) -> None:
    assert found[run]["left"] == []
