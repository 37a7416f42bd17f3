"""Checkpoints: manifest, atomic commit, retention, and what a resume may find changed. Files only."""

from rlhf.checkpoint.compatible import Change, breaking, differences, explain
from rlhf.checkpoint.errors import CheckpointError, CorruptCheckpoint, NewerFormat, NoCheckpoint, StateError
from rlhf.checkpoint.fingerprint import Fingerprint, compare, fingerprint
from rlhf.checkpoint.manifest import Checkpoint, FileEntry
from rlhf.checkpoint.state import DRIVER_STATE, Stateful, StateRegistry
from rlhf.checkpoint.store import CheckpointStore, Phase

__all__ = [
    "DRIVER_STATE",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "CorruptCheckpoint",
    "FileEntry",
    "Fingerprint",
    "NewerFormat",
    "NoCheckpoint",
    "Phase",
    "StateError",
    "StateRegistry",
    "Stateful",
    "breaking",
    "compare",
    "differences",
    "explain",
    "fingerprint",
]
