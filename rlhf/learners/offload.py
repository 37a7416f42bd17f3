"""What of a learner's state lies outside of its device, at ZeRO stage 3: in its host's memory, or on a disk.

On a disk there is the optimizer's: masters, moments, and gradients once a step's are complete. DeepSpeed swaps it in by
sub-groups of the parameters, through buffers in memory, with an asynchronous I/O that it compiles against libaio at the
first use.

Not there, since DeepSpeed (0.19.8) doesn't do it right: weights on a disk (its swapper runs out of buffers in a forward
pass), and checkpoints (it loads the files and not Adam's count of steps).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from rlhf.config.schema import LearnerConfig

# Elements of a rank's share that are swapped in at a time.
SUB_GROUP_ELEMENTS = 25_000_000
# Of a sub-group there are masters, two moments and gradients, in float32.
BUFFERS = 4
_SWAPPED_BYTES = 4 * BUFFERS


class NoDisk(RuntimeError):
    """The optimizer's state can't lie on a disk here."""


def sections(learner: LearnerConfig, disk: Path | None) -> dict[str, Any]:
    """Of DeepSpeed's ZeRO settings those that say what lies where; torch's AdamW steps on the host.

    DeepSpeed would have to compile an AdamW of its own.
    """
    if learner.offload == "none":
        return {}
    host = {"device": "cpu", "pin_memory": True}
    found: dict[str, Any] = {"offload_optimizer": host}
    if learner.offload == "optimizer_and_parameters":
        found["offload_param"] = host
    if disk is not None:
        found["offload_optimizer"] = {"device": "nvme", "nvme_path": str(disk), "buffer_count": BUFFERS}
        found["sub_group_size"] = SUB_GROUP_ELEMENTS
    return found


def make_folder() -> Path:
    """A new folder among the run's temporary files for one rank's swapped state, once it can be written to and read.

    Raises `NoDisk` where the I/O can't be compiled, or temporary files lie in memory.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    remedy = "Or set policy.offload_to and critic.offload_to: host"
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise NoDisk(
            "DeepSpeed's asynchronous I/O needs libaio with its headers, and a C++ compiler. Install them on every "
            f"node (Debian: apt install libaio-dev g++). {remedy}"
        )
    parent = Path(tempfile.gettempdir())
    if kind := _memory_file_system(parent):
        raise NoDisk(f"{parent} is a {kind}, which is memory. Set TMPDIR to a folder on a fast local disk. {remedy}")
    # Where the environment of this Python isn't activated, its ninja is not found.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    AsyncIOBuilder().load(verbose=False)
    return Path(tempfile.mkdtemp(prefix="offload-"))


def check_room(disk: Path, parameters: int) -> None:
    """Raise `NoDisk` unless the state of so many parameters fits."""
    needed, free = _SWAPPED_BYTES * parameters, shutil.disk_usage(disk).free
    if needed > free:
        raise NoDisk(
            f"the optimizer's state of a rank has {needed / 1e9:.1f} GB, and {disk.parent} has {free / 1e9:.1f} GB "
            "free. Set TMPDIR to a folder on a larger disk, or raise the ranks"
        )


def _memory_file_system(folder: Path) -> str | None:
    """The kind of the folder's file system where that is memory."""
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(m.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return kind if kind in ("tmpfs", "ramfs") else None
