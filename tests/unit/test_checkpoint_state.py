"""The driver's own state: what is registered is saved, and comes back as it was or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.checkpoint import CheckpointError, StateError, StateRegistry


class Box:
    """Something stateful."""

    def __init__(self, **state: Any) -> None:
        self.state: Mapping[str, Any] = state

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


def registry(**objects: Box) -> StateRegistry:
    made = StateRegistry()
    for name, box in objects.items():
        made.register(name, box)
    return made


def round_trip(path: Path, **state: Any) -> Mapping[str, Any]:
    registry(box=Box(**state)).save(path)
    there = Box()
    registry(box=there).load(path)
    return there.state


def test_every_object_gets_its_own_state_back(tmp_path: Path) -> None:
    registry(sampler=Box(next=12), kl=Box(coefficient=0.1)).save(tmp_path / "driver.json")
    sampler, kl = Box(), Box()
    registry(kl=kl, sampler=sampler).load(tmp_path / "driver.json")
    assert (sampler.state, kl.state) == ({"next": 12}, {"coefficient": 0.1})


@pytest.mark.parametrize(
    "value",
    [
        2**53 + 1,
        -(2**200),
        0.1 + 0.2,
        5e-324,
        1.7976931348623157e308,
        True,
        None,
        "é\ud7ff\n",
        [],
        [[1], {"a": [None]}],
    ],
)
def test_values_come_back_exactly(tmp_path: Path, value: object) -> None:
    back = round_trip(tmp_path / "s", value=value)["value"]
    assert (back, type(back)) == (value, type(value))


def test_the_sign_of_zero_and_numpys_floats_come_back(tmp_path: Path) -> None:
    back = round_trip(tmp_path / "s", zero=-0.0, third=np.float64(1) / 3)
    assert str(back["zero"]) == "-0.0"
    assert back["third"] == 1 / 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"state box\.deep\.1 is nan"),
        (float("-inf"), r"state box\.deep\.1 is -inf"),
        ((1, 2), r"state box\.deep\.1 is a tuple"),
        (np.int64(3), r"state box\.deep\.1 is a int64"),
        (np.float32(0.5), r"state box\.deep\.1 is a float32"),
        (b"bytes", r"state box\.deep\.1 is a bytes"),
        ({1: "a"}, r"state box\.deep\.1 has the key 1"),
    ],
)
def test_what_json_would_change_is_refused_and_named(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(StateError, match=said):
        registry(box=Box(deep=[0, value])).save(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_missing_and_surplus_names_are_an_error_and_nothing_is_loaded(tmp_path: Path) -> None:
    registry(sampler=Box(next=1), ledger=Box(drawn=8), router=Box(n=0)).save(tmp_path / "driver.json")
    sampler = Box(next=0)
    with pytest.raises(StateError, match=r"it lacks kl, wandb; it has ledger, router, which nothing here takes"):
        registry(sampler=sampler, kl=Box(), wandb=Box()).load(tmp_path / "driver.json")
    assert sampler.state == {"next": 0}


def test_a_name_is_registered_once() -> None:
    with pytest.raises(StateError, match="'kl' is registered already"):
        made = registry(kl=Box())
        made.register("kl", Box())


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"box": ', "\x00"])
def test_a_file_that_holds_no_state_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "driver.json").write_text(text)
    with pytest.raises(StateError, match=r"driver\.json"):
        registry(box=Box()).load(tmp_path / "driver.json")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"driver\.json can't be read: .*No such file"):
        registry(box=Box()).load(tmp_path / "driver.json")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot save /dev/full: {os.strerror(errno.ENOSPC)}"):
        registry(box=Box(next=1)).save(Path("/dev/full"))
