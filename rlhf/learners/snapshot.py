"""Copies of a rank's state in CPU memory, and files that are written from them while training goes on.

Invariants
- What is written is the state at the moment of `Writer.start`. It is copied in the background, and whoever changes it
  waits for `Writer.copied` before: a copy is quick, and the update that comes next begins with long passes that only
  read.
- A tensor is copied by its own elements, not by the storage that it is a view of, and once however often it occurs.
- `Writer.finish` returns when all files and their folders are on the disk, or raises what copying or writing raised.
- There is one copy at a time: the next one waits until this one is written (`Writer.settle`). Its memory is kept, since
  fresh memory costs several times the copy.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.cluster.disk import sync_folder

# Bytes; where a tensor begins in a snapshot's memory.
ALIGNMENT = 64
# Bytes that one system call writes. Other threads run meanwhile.
WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What a save took behind its caller's back, on this rank.

    `seconds` until everything was on the disk, `bytes` of the files, and `waited`: the seconds that those who would
    have changed the state had to wait for its copy.
    """

    seconds: float
    bytes: int
    waited: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state: `structure` is its pickle with numbers in the place of tensors, which are its own or copies."""

    structure: bytes
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def restore(self) -> Any:
        """The state, made of the snapshot's own tensors."""
        return _Restorer(io.BytesIO(self.structure), self.tensors).load()


class _Collector(pickle.Pickler):
    """Pickles a state and sets its tensors aside, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        # Tied parameters are different objects over the same elements.
        key = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if key not in self._places or value.numel() == 0:
            self._places[key] = len(self.tensors)
            self.tensors.append(value.detach())
        return self._places[key]


class _Restorer(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def collect(state: object) -> Snapshot:
    """Take `state`, anything that can be pickled, as it is; its tensors are not copied yet."""
    structure = io.BytesIO()
    collector = _Collector(structure)
    collector.dump(state)
    return Snapshot(structure.getvalue(), collector.tensors)


class Memory:
    """CPU memory that the copies for one file are made in, one after the other."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def copy(self, taken: Snapshot) -> Snapshot:
        """The snapshot with copies of its tensors. The copy before is overwritten."""
        offsets, end = [], 0
        for tensor in taken.tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(tensor.is_cuda for tensor in taken.tensors)
        if self._buffer is None or self._buffer.nbytes < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        if on_gpu:
            # What the step before has begun, on whichever stream.
            torch.cuda.synchronize()
        copies = [_part(self._buffer, at, tensor) for at, tensor in zip(offsets, taken.tensors, strict=True)]
        for copy, tensor in zip(copies, taken.tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return Snapshot(taken.structure, copies)


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """A contiguous tensor of that shape at `offset` of the buffer. Its storage is its own elements and no more."""
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    part = torch.frombuffer(buffer.numpy(), dtype=like.dtype, count=like.numel(), offset=offset)
    return part.view(like.shape)


class Writer:
    """Copies and writes the files of one save in a thread of its own.

    `start` and `settle` are called by the thread that trains, `copied` before it changes anything, and `finish` by
    any.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._memory: dict[str, Memory] = {}
        self._copied = threading.Event()
        self._waited = 0.0
        self._last: Future[WriteReport] | None = None
        self._asked = True

    def start(self, files: Mapping[Path, Snapshot | bytes]) -> None:
        """Begin to write `files`: a state as `torch.save` does, bytes as they are. `settle` comes before."""
        assert self._last is None or self._last.done(), "a write is under way"
        self._asked, self._waited = False, 0.0
        self._copied.clear()
        self._last = self._thread.submit(self._run, dict(files))

    def copied(self) -> None:
        """Wait until the state that is being saved may change."""
        if self._last is not None and not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self._waited += time.perf_counter() - started

    def finish(self) -> WriteReport:
        """Wait for the last write; raises `OSError` with the file and the reason when it failed."""
        if self._last is None:
            raise RuntimeError("nothing was saved")
        self._asked = True
        return self._last.result()

    def settle(self) -> None:
        """Wait for a write that is under way; raises its failure where nobody has asked for it by `finish`."""
        if self._last is None:
            return
        failure = self._last.exception()
        if failure is not None and not self._asked:
            self._asked = True
            raise failure

    def _run(self, files: dict[Path, Snapshot | bytes]) -> WriteReport:
        started = time.perf_counter()
        try:
            for path, content in files.items():
                if isinstance(content, Snapshot):
                    files[path] = self._memory.setdefault(path.name, Memory()).copy(content)
        finally:
            self._copied.set()
        written = _write_all(files)
        return WriteReport(time.perf_counter() - started, written, self._waited)


def _write_all(files: Mapping[Path, Snapshot | bytes]) -> int:
    written = sum(_write(path, content) for path, content in files.items())
    folders = {path.parent for path in files}
    for folder in sorted(folders | {folder.parent for folder in folders}):
        sync_folder(folder)
    return written


def _write(path: Path, content: Snapshot | bytes) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            sink = _Sink(file)
            try:
                if isinstance(content, bytes):
                    sink.write(content)
                else:
                    torch.save(content.restore(), sink)  # type: ignore[arg-type]
            except Exception:
                # torch reports a failed write without saying why.
                if sink.error is not None:
                    raise sink.error from None
                raise
            os.fsync(file.fileno())
            return sink.written
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


class _Sink:
    """A file for `torch.save` that remembers why writing failed."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.written = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += self._file.write(view[done : done + WRITE_BYTES])
        except OSError as error:
            self.error = error
            raise
        self.written += done
        return done

    def flush(self) -> None:
        """Nothing is buffered here."""
