"""TensorBoard event files, written without torch and without TensorFlow."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from areal_lab.sinks.protocol import Point, RunFacts


class TensorBoardSink:
    """Scalars by step, whose relative time is the run's (a simulated cluster's in `cosim`)."""

    def __init__(self, run: RunFacts) -> None:
        folder = Path(run.option("path") or run.folder / "tensorboard")
        self.where = f"tensorboard --logdir {folder}"
        self._writer = EventFileWriter(str(folder))
        self._began_s = run.began_s
        self._last_s = run.began_s
        self._add(_text("config", run.config), 0)

    def log(self, point: Point) -> None:
        """See `Sink`."""
        if point.time_s is not None:
            self._last_s = self._began_s + point.time_s
        values = [Summary.Value(tag=tag, simple_value=one) for tag, one in point.values.items()]
        self._add(Summary(value=values), point.step)

    def picture(self, name: str, file: Path, step: int) -> None:
        """See `Sink`."""
        png = file.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # of the header chunk, which comes first
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Sink`."""
        self._add(_text("failed summary" if failed else "summary", summary), 0)
        self._writer.close()

    def _add(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(wall_time=self._last_s, step=step, summary=summary))
        self._writer.flush()


def _text(tag: str, values: Mapping[str, Any]) -> Summary:
    """An object as text whose line breaks TensorBoard keeps."""
    written = "    " + json.dumps(values, indent=2).replace("\n", "\n    ")
    tensor = TensorProto(dtype=DT_STRING, string_val=[written.encode()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
