"""TensorBoard: event files, written without TensorFlow and without torch."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from inpaint_bench.core.schema import Status

from .api import TrackedRun, Value

_NAME_CHARS = 100  # longest name of a folder


class TensorBoard:
    """One folder of event files; a requeued run adds a file."""

    tracked_run: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        # TensorBoard shows the folder as the name of the run.
        folder = run.files / "tensorboard" / re.sub(r"[^\w.+=-]+", "-", run.name)[:_NAME_CHARS]
        self.link = str(folder)
        self._writer = EventFileWriter(self.link)
        # For the columns and filters of its table of runs.
        self._writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(run.tags, trial_id=run.run_id)))

    def log(self, values: Sequence[Value]) -> None:
        for value in values:
            summary = Summary(value=[Summary.Value(tag=value.name, simple_value=value.value)])
            self._writer.add_event(Event(wall_time=value.unix_s, step=value.step, summary=summary))
        self._writer.flush()

    def picture(self, name: str, path: Path, step: int) -> None:
        with Image.open(path) as image:
            width, height = image.size
            channels = len(image.getbands())
        encoded = Summary.Image(width=width, height=height, colorspace=channels, encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag=name, image=encoded)])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finish(self, status: Status) -> None:
        """Close the file; it has no place for a status."""
        self._writer.close()


start = TensorBoard
