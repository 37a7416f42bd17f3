"""One rank of learners whose optimizer state lies on a disk: the process behind `test_learner_disk.py`."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from rlhf.learners import offload
from tests.integration.learner_memory_ranks import check_offload
from tests.integration.learner_ranks import Rank, leave, make_config, parse


def check_close(arguments: argparse.Namespace) -> list[str]:
    """What is on the disk of a learner after its end."""
    settings = {"zero_stage": 3, "offload": "optimizer", "offload_to": "disk"}
    learner = Rank(arguments, make_config(Path(arguments.models) / "untied", policy=settings)).learner
    assert list(learner._disk.iterdir())
    learner.close()
    return [str(path) for path in learner._disk.parent.glob(f"{learner._disk.name}*")]


def main() -> None:
    arguments = parse()
    tempfile.tempdir = arguments.out
    # Several sub-groups, each large enough to be swapped; the same in the host's memory, where norms are then added up
    # in the same order.
    sections = offload.sections
    offload.sections = lambda *given: {**sections(*given), "sub_group_size": 600_000}
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for what in ("optimizer", "optimizer_and_parameters"):
            found[f"{what} {dtype} host"] = check_offload(arguments, what, dtype)
            found[f"{what} {dtype} disk"] = check_offload(arguments, what, dtype, "disk")
    found["left"] = check_close(arguments)
    leave(found, arguments)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
