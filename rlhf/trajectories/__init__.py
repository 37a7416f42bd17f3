"""The records that travel and the ledger that accounts for them."""

from rlhf.trajectories.ledger import Ledger, LedgerError, Outcome
from rlhf.trajectories.records import Columns, FinishReason, Group, Prompt, PromptDraw, SamplingMask, Trajectory

__all__ = [
    "Columns",
    "FinishReason",
    "Group",
    "Ledger",
    "LedgerError",
    "Outcome",
    "Prompt",
    "PromptDraw",
    "SamplingMask",
    "Trajectory",
]
