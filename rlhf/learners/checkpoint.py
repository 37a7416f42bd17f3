"""Save a learner's whole state and load it again.

Invariants
- What a rank needs to go on exactly is saved: master weights, optimizer, counters, its random streams, and what the
  learner itself counts. Settings come from the configuration, state from the checkpoint. Frozen weights are not saved:
  they are the model's, whose fingerprint the run keeps.
- The caller hardly waits: the state is copied, and files are written and synced, while training goes on up to the next
  change of the state, which waits for the copy (`rlhf.learners.snapshot`).
- A failure on one rank is raised on all of them, and a failed write harms nothing but the checkpoint.
- Loading changes nothing in the folder, and loads all of the state or raises; never weights alone.

Files: `shards/` is DeepSpeed's own checkpoint, so that the `zero_to_fp32.py` beside it works; `learner.json` says what
was saved, and `rank-<n>.json` has the random streams of each rank.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from rlhf.learners.ranks import Ranks
from rlhf.learners.snapshot import Snapshot, Writer, WriteReport, collect
from rlhf.learners.zero import ZeroEngine

log = logging.getLogger(__name__)

OnWorldSizeChange = Literal["convert", "error"]

FORMAT = 1
SHARDS = "shards"
UNIVERSAL = "universal"
LEARNER_FILE = "learner.json"
# Where DeepSpeed's tools look for the name of the folder with the shards.
LATEST_FILE = "latest"
SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How long `save` kept its caller waiting, in seconds, and the bytes of all tensors that it saves on this rank."""

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The weight version that was loaded, and the number of ranks it was converted from, if it was."""

    version: int
    converted_from: int | None


class SnapshotEngine(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed hands its files to: they are collected, and nothing is copied or written.

    It doesn't raise on saving: DeepSpeed's ranks meet in barriers between the files, and one that leaves would keep
    the others waiting. Whoever asks for the snapshots finds the failure.
    """

    def __init__(self, only: frozenset[str] | None) -> None:
        """`only` are the names of the weights that are saved; all where it is None."""
        super().__init__()
        self.name = "snapshot"
        self._only = only
        self._snapshots: dict[Path, Snapshot] = {}
        self._failure: Exception | None = None

    def collected(self) -> dict[Path, Snapshot]:
        """The snapshots of the files since the last call; raises what collecting one raised."""
        snapshots, failure = self._snapshots, self._failure
        self._snapshots, self._failure = {}, None
        if failure is not None:
            raise failure
        return snapshots

    def save(self, state_dict: Any, path: str) -> None:
        try:
            optimizer = state_dict.get("optimizer_state_dict")
            if optimizer is not None:
                # DeepSpeed's BF16_Optimizer, which is ZeRO stage 1, leaves it out, and `zero_to_fp32` wants it.
                optimizer.setdefault("zero_stage", 1)
            if self._only is not None and "module" in state_dict:
                # Of a frozen parameter with two names, as a tied head has, DeepSpeed leaves out the first only.
                state_dict["module"] = {name: w for name, w in state_dict["module"].items() if name in self._only}
            self._snapshots[Path(path)] = collect(state_dict)
        except Exception as error:
            self._failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made when files are written."""

    def commit(self, info: Any) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """No: tensors are copied by their own elements, so DeepSpeed need not clone them first."""
        return False


class LearnerCheckpoint:
    """The checkpoints of one rank of a learner. All methods but `finish` are collective."""

    def __init__(self, role: str, dtype: str, zero: ZeroEngine, ranks: Ranks) -> None:
        self._identity = {"role": role, "zero_stage": zero.stage, "dtype": dtype}
        self._zero = zero
        self._ranks = ranks
        self._trained = frozenset(name for name, p in zero.model.named_parameters() if p.requires_grad)
        self._some_frozen = any(not p.requires_grad for p in zero.model.parameters())
        self._snapshots = SnapshotEngine(self._trained if self._some_frozen else None)
        self._writer = Writer()
        zero.before_change = self._writer.copied
        zero.deepspeed.checkpoint_engine = self._snapshots
        # DeepSpeed would copy its script into the folder at once, on one rank before a barrier.
        zero.deepspeed._copy_recovery_script = lambda path: None

    def save(self, path: Path, counters: dict[str, Any]) -> SaveReport:
        """Begin to write the state as it is now, and `counters` (JSON values), into the folder `path`.

        Waits for the save before this one, and raises `LearnerError` when that one failed.
        """
        started = time.perf_counter()
        with self._ranks.together(f"writing the {self._identity['role']}'s checkpoint before"):
            self._writer.settle()
        self._zero.deepspeed.save_checkpoint(
            str(path), tag=SHARDS, save_latest=False, exclude_frozen_parameters=self._some_frozen
        )
        with self._ranks.together(f"the {self._identity['role']}'s snapshot for {path}"):
            snapshots = self._snapshots.collected()
            files: dict[Path, Snapshot | bytes] = {**snapshots, **self._own_files(path, counters)}
        self._writer.start(files)
        return SaveReport(time.perf_counter() - started, sum(taken.nbytes for taken in snapshots.values()))

    def finish(self) -> WriteReport:
        """Wait until this rank's part of the last save is on the disk; raises `OSError` with the file and the reason.

        The only method that is not collective, so it may run in another thread while the ranks train.
        """
        return self._writer.finish()

    def load(self, path: Path, on_world_size_change: OnWorldSizeChange) -> tuple[LoadReport, dict[str, Any]]:
        """Load the state saved at `path`; returns a report and the counters that were saved with it.

        DeepSpeed unpickles its shards, which can run any code: only folders whose manifest was verified before, and
        which this run or its user named, may come here. Raises `LearnerError` when the checkpoint is of another role,
        ZeRO stage or dtype, and, where `on_world_size_change` is "error", of another number of ranks. After a
        conversion, random streams of ranks that were not saved stay as they are.
        """
        with self._ranks.together(f"loading {path}"):
            self._writer.settle()
            saved = _read(path / LEARNER_FILE)
            check_saved(saved, self._identity, self._ranks.world_size, on_world_size_change)
        saved_ranks = int(saved["world_size"])
        converted = saved_ranks != self._ranks.world_size
        if converted:
            if self._ranks.rank == 0:
                log.warning("converting %s from %d ranks to %d", path, saved_ranks, self._ranks.world_size)
            self._load_converted(path)
        else:
            self._load_shards(path, SHARDS)
        self._zero.apply_settings()
        with self._ranks.together(f"loading the random streams of {path}"):
            if self._ranks.rank < saved_ranks:
                restore_random_state(_read(_rank_file(path, self._ranks.rank)), self._ranks.device)
        counters = saved["counters"]
        return LoadReport(counters["version"], saved_ranks if converted else None), counters

    def _own_files(self, path: Path, counters: dict[str, Any]) -> dict[Path, bytes]:
        """The files besides the shards that this rank writes."""
        files = {_rank_file(path, self._ranks.rank): _json(random_state(self._ranks.device))}
        if self._ranks.rank == 0:
            from deepspeed.utils import zero_to_fp32

            assert zero_to_fp32.__file__ is not None
            saved = {"format": FORMAT, **self._identity, "world_size": self._ranks.world_size, "counters": counters}
            files[path / LEARNER_FILE] = _json(saved)
            files[path / LATEST_FILE] = SHARDS.encode()
            files[path / SCRIPT] = Path(zero_to_fp32.__file__).read_bytes()
        return files

    def _load_shards(self, path: Path, tag: str) -> None:
        load = self._load_trained if self._some_frozen else None
        found, _ = self._zero.deepspeed.load_checkpoint(str(path), tag=tag, custom_load_fn=load)
        if found is None:
            raise FileNotFoundError(f"{path} has no shards that DeepSpeed could load")

    def _load_trained(self, src: dict[str, Any], dst: torch.nn.Module) -> None:
        """DeepSpeed's loading of weights, for a model whose frozen ones are not in the checkpoint."""
        if src.keys() != self._trained:
            odd = sorted(src.keys() ^ self._trained)
            raise ValueError(f"the checkpoint doesn't have the weights that are trained here, or others: {odd[:3]}")
        dst.load_state_dict(src, strict=False)

    def _load_converted(self, path: Path) -> None:
        """Convert the shards in a folder beside `path`, load them, and remove it."""
        beside = path.with_name(f".{path.name}.{UNIVERSAL}")
        try:
            with self._ranks.together(f"converting {path}"):
                if self._ranks.rank == 0:
                    _to_universal(path / SHARDS, beside / UNIVERSAL)
            with _universal(self._zero.deepspeed):
                self._load_shards(beside, UNIVERSAL)
            self._zero.own_step_counts()
            # Until all have read it.
            with self._ranks.together(f"loading {path} converted"):
                pass
        finally:
            if self._ranks.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)


def check_saved(
    saved: dict[str, Any], identity: dict[str, Any], world_size: int, on_world_size_change: OnWorldSizeChange
) -> None:
    """Raise `ValueError` when what was saved can't be loaded by a learner like this."""
    if saved["format"] != FORMAT:
        raise ValueError(f"it has format {saved['format']}, and this version reads format {FORMAT}")
    for name, value in identity.items():
        if saved[name] != value:
            raise ValueError(f"it was saved with {name} {saved[name]}, and this learner has {name} {value}")
    if saved["world_size"] != world_size and on_world_size_change == "error":
        raise ValueError(
            f"it was saved by {saved['world_size']} ranks, and this learner has {world_size}. Give it "
            f"{saved['world_size']} ranks, or set on_world_size_change: convert"
        )
    if saved["world_size"] != world_size and saved["counters"]["version"] == 0:
        raise ValueError(
            f"it was saved by {saved['world_size']} ranks before their first update, which DeepSpeed can't convert to "
            f"{world_size}. Begin at step 1"
        )


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random streams, as JSON values: Python, numpy, torch, and torch's on `device`."""
    version, words, gauss = random.getstate()
    arrays = np.random.get_state(legacy=False)
    assert isinstance(arrays, dict)
    twister = arrays["state"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": arrays["bit_generator"],
            "state": {"key": twister["key"].tolist(), "pos": int(twister["pos"])},
            "has_gauss": int(arrays["has_gauss"]),
            "gauss": float(arrays["gauss"]),
        },
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set this process's random streams to what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    twister = {**state["numpy"]["state"], "key": np.array(state["numpy"]["state"]["key"], dtype=np.uint32)}
    np.random.set_state({**state["numpy"], "state": twister})
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _rank_file(path: Path, rank: int) -> Path:
    return path / f"rank-{rank:05d}.json"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _to_universal(shards: Path, target: Path) -> None:
    """DeepSpeed's conversion to a checkpoint for any number of ranks, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    # One worker means none but this process; forked ones would inherit its process group.
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(shards),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            # Describes tensor-parallel layers to the converter; there are none.
            inject_missing_state=True,
        )
    )


@contextmanager
def _universal(engine: Any) -> Iterator[None]:
    """Within the block the DeepSpeed engine reads converted checkpoints."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
