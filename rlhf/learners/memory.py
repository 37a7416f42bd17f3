"""The most memory that a rank held in a phase of its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Writing 5 lowers the peak that the kernel keeps to what is resident now (man 5 proc_pid_clear_refs).
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PhasePeaks:
    """Peaks by phase, bytes: on CPU the process's resident memory, on a GPU what torch has allocated there.

    Where the kernel's peak can't be lowered, a phase can't be told from those before it, and has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a phase; of one that recurs the largest peak counts."""
        lowered = self._lower()
        try:
            yield
        finally:
            if lowered:
                self._peaks[name] = max(self._peaks.get(name, 0), self._read())

    def take(self) -> dict[str, int]:
        """Hand out the peaks since the last time, and forget them."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _lower(self) -> bool:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return True

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
