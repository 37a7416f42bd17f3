"""TensorBoard: event files in `<run>/tensorboard/`, written by tensorboard's own writer (no torch, no TensorFlow)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlhf.config import dump_config
from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.trackers import RunStatus


class TensorBoardTracker:
    """Every metric as a scalar, and the configuration as a text."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, config: Config, folder: RunFolder) -> None:
        """Open the event file and write the configuration, secrets redacted."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder.tensorboard))
        text = f"```yaml\n{dump_config(config)}\n```".encode()
        as_text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text])
        self._write(Summary(value=[Summary.Value(tag="config/text_summary", metadata=as_text, tensor=tensor)]), step=0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar a metric; NaN and infinities are written as they are."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(Summary(value=values), step)

    def finish(self, status: RunStatus) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a step takes seconds, and a run that is killed keeps its last one
