"""What saves memory or communication changes no gradient and no weight: one rank and two ranks over gloo.

The three processes run once for the module (`learner_memory_ranks.py`); the tests read what they found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.test_learner import (
    BFLOAT16_BOUND,
    FLOAT32_BOUND,
    RUNS,
    STAGES,
    Found,
    gradients_of,
    relative,
    run_ranks,
)
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner-memory")
    make_tiny_model(folder / "untied")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return run_ranks("learner_memory_ranks", folder)


@pytest.fixture(scope="module")
def plain_gradients(folder: Path) -> dict[str, torch.Tensor]:
    return gradients_of(folder / "untied")


class TestCommunication:
    @pytest.mark.parametrize("run", RUNS[1:])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_at_stage_1_gradients_are_reduced_once_however_many_micro_batches_there_are(
        self, found: Found, run: str, dtype: str
    ) -> None:
        # What three micro-batches more add is a vote each, before they go backward.
        calls = found[run][f"collectives 1 {dtype}"]
        assert calls[4] - calls[1] == 3

    @pytest.mark.parametrize("run", RUNS[1:])
    def test_at_stage_2_every_micro_batch_is_reduced(self, found: Found, run: str) -> None:
        # A vote each, and at least one reduction: a count that can tell the two apart.
        calls = found[run]["collectives 2 float32"]
        assert calls[4] - calls[1] >= 6


class TestActivationCheckpointing:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("layout", ["1x8", "8x1"])
    def test_gradient_is_the_same(
        self, found: Found, plain_gradients: dict[str, torch.Tensor], run: str, stage: int, layout: str
    ) -> None:
        checked = found[run][f"recomputation {stage}"]
        assert checked["in effect"]
        assert relative(checked[f"gradients {layout}"], plain_gradients) < FLOAT32_BOUND

    @pytest.mark.parametrize("run", RUNS)
    def test_sharded_weights_do_not_stay_whole_after_layers_were_computed_again(self, found: Found, run: str) -> None:
        # Two layers of 7 matrices, embedding and head. Keys and values, 128 x 64, are too small to be sharded.
        assert found[run]["recomputation 1"]["whole matrices"] == 16
        assert found[run]["recomputation 3"]["whole matrices"] == 4


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("offload", ["optimizer", "optimizer_and_parameters"])
class TestOffload:
    @pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32_BOUND), ("bfloat16", BFLOAT16_BOUND)])
    def test_gradient_is_the_same(
        self, found: Found, plain_gradients: dict[str, torch.Tensor], run: str, offload: str, dtype: str, bound: float
    ) -> None:
        for layout in ("1x8", "8x1"):
            gradients = found[run][f"offload {offload} {dtype}"][f"gradients {layout}"]
            assert relative(gradients, plain_gradients) < bound

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_three_updates_give_the_weights_that_they_give_without(
        self, found: Found, run: str, offload: str, dtype: str
    ) -> None:
        plain, offloaded = (found[run][f"offload {what} {dtype}"] for what in ("none", offload))
        # "sent" is what engines get.
        for which in ("weights", "sent"):
            assert relative(offloaded[which], plain[which]) < 1e-6
        # The setting has arrived in DeepSpeed, or equal weights would prove nothing.
        expected = (True, offload == "optimizer_and_parameters")
        assert offloaded["in effect"] == expected

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_steps_that_fail_leave_every_bit(self, found: Found, run: str, offload: str, dtype: str) -> None:
        checked = found[run][f"offload {offload} {dtype}"]
        assert "was not applied" in checked["gradient overflows"]
        assert "not finite" in checked["NaN advantage"]
        assert checked["unmoved"]


@pytest.mark.parametrize("run", RUNS)
class TestAdapters:
    """What saves memory goes together with adapters, whose layers compute again and are gathered among frozen ones."""

    @pytest.mark.parametrize(
        "settings",
        ["recomputation 1", "recomputation 2", "recomputation 3", "optimizer", "optimizer_and_parameters"],
    )
    def test_updates_leave_what_they_leave_without(self, found: Found, run: str, settings: str) -> None:
        alone, checked = found["one rank"]["adapters"], found[run][f"adapters {settings}"]
        # Measured 1.2e-5 and 2.2e-7.
        assert relative(checked["adapters"], alone["adapters"]) < 1e-4
        assert relative(checked["sent"], alone["sent"]) < 1e-5
        assert checked["reference is the same"]

    def test_the_updates_have_moved_them(self, found: Found, run: str) -> None:
        moved = [p for name, p in found[run]["adapters"]["adapters"].items() if "lora_B" in name]
        assert moved and all(p.abs().max() > 1e-3 for p in moved)
