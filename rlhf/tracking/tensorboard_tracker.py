"""TensorBoard: event files in `<run>/tensorboard/`, written by tensorboard's own writer (no torch, no TensorFlow).

Event files only grow. What a rewind undoes is taken back by TensorBoard's own mark of a restart: whoever reads them
drops the events before the mark, in this file and in earlier ones, whose step is the mark's or later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlhf.config import dump_config
from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.trackers import RunStatus


class TensorBoardTracker:
    """Every metric as a scalar; the configuration as a text, at the first step that it was used for."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._config = ""

    def start(self, config: Config, folder: RunFolder) -> None:
        """Open an event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder.tensorboard))
        self._config = dump_config(config)

    def rewind(self, step: int | None) -> None:
        """Have events after `step` dropped, and write the configuration that is used from there, secrets redacted."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        first = 0 if step is None else step + 1
        self._write(first, session_log=SessionLog(status=SessionLog.START))
        text = f"```yaml\n{self._config}\n```".encode()
        as_text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text])
        value = Summary.Value(tag="config/text_summary", metadata=as_text, tensor=tensor)
        self._write(first, summary=Summary(value=[value]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar a metric; NaN and infinities are written as they are."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(step, summary=Summary(value=values))

    def finish(self, status: RunStatus) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()  # a step takes seconds, and a run that is killed keeps its last one
