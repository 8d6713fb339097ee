"""TensorBoard's event files: its own records and summaries, in files whose errors are those of a run folder.

Imports protobuf, which takes 0.2 s: import this module when there is a first row. torch.utils.tensorboard would import
TensorFlow, where that is installed: 5 s and hundreds of MB in the middle of a training.
"""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from trainkit.files import naming
from trainkit.trainer.ownership import OwnershipToken

_HPARAMS = "hparams"


class EventFile:
    """A file of scalars, images and texts for TensorBoard; `flush` makes them visible.

    TensorBoard's `EventFileWriter` would import TensorFlow where that is installed, and write from a thread whose
    errors come late.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     events = EventFile(Path(folder))
        ...     events.scalars({"train/loss": 0.5}, step=10)
        ...     events.close()
        ...     len(list(Path(folder).glob("events.out.tfevents.*")))
        1
    """

    def __init__(self, folder: Path, *, purge_after: int | None = None, suffix: str = "") -> None:
        """Start a new file in a folder.

        Args:
            folder: created if absent; its parent must exist. Files of earlier attempts stay.
            purge_after: the step that a resumed run continues from: TensorBoard drops later steps of earlier files.
            suffix: suffix of the file's name.
        """
        with naming(folder):
            folder.mkdir(exist_ok=True)
        stamp = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / f"events.out.tfevents.{stamp}{suffix}"
        with naming(self._path):
            self._file = self._path.open("xb", buffering=0)
        self._pending = io.BytesIO()
        self._records = RecordWriter(self._pending)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_after is not None:
            # A session that starts at step s invalidates s and all later steps.
            log = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_after + 1, session_log=log))
        self.flush()

    def add(self, content: Summary, *, step: int = 0, wall_time: float | None = None) -> None:
        """Add a summary, with the time of its measurement; None: now."""
        moment = time.time() if wall_time is None else wall_time
        self._write(Event(wall_time=moment, step=step, summary=content))

    def scalars(self, values: Mapping[str, float], *, step: int, wall_time: float | None = None) -> None:
        """Add one point to each named curve."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.add(Summary(value=points), step=step, wall_time=wall_time)

    def image(self, name: str, pixels: NDArray[np.uint8], *, step: int) -> None:
        """Add an image: (height, width, 1 or 3)."""
        height, width, channels = pixels.shape
        png = io.BytesIO()
        Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels).save(png, format="PNG")
        picture = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png.getvalue())
        self.add(Summary(value=[Summary.Value(tag=name, image=picture)]), step=step)

    def text(self, name: str, markdown: str, *, step: int) -> None:
        """Add a text, as Markdown."""
        description = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()], tensor_shape=shape)
        self.add(Summary(value=[Summary.Value(tag=name, metadata=description, tensor=tensor)]), step=step)

    def histogram(self, name: str, counts: Mapping[int, int], *, step: int) -> None:
        """Add the number of occurrences of each whole number."""
        numbers = range(min(counts), max(counts) + 1)
        total, squares = (float(sum(count * number**power for number, count in counts.items())) for power in (1, 2))
        limits, values = [number + 0.5 for number in numbers], [counts.get(number, 0) for number in numbers]
        self.buckets(name, limits, values, ends=(numbers[0], numbers[-1], total, squares), step=step)

    def buckets(
        self,
        name: str,
        limits: Sequence[float],
        counts: Sequence[int],
        *,
        ends: tuple[float, float, float, float],
        step: int,
    ) -> None:
        """Add a histogram.

        Args:
            name: the tag.
            limits: the upper limit of each bucket, ascending.
            counts: the values in each bucket.
            ends: the smallest and the largest value, the sum of the values and the sum of their squares.
            step: the step of the histogram.
        """
        low, high, total, squares = ends
        content = HistogramProto(
            min=low, max=high, num=sum(counts), sum=total, sum_squares=squares, bucket_limit=limits, bucket=counts
        )
        self.add(Summary(value=[Summary.Value(tag=name, histo=content)]), step=step)

    def flush(self) -> None:
        """Write what was added since the last flush.

        Raises:
            StorageError: it cannot be written, and is dropped: a truncated record makes all later ones unreadable.
        """
        pending = memoryview(self._pending.getvalue())
        self._pending.seek(0)
        self._pending.truncate()
        with naming(self._path, needed=len(pending)):
            while pending:
                pending = pending[self._file.write(pending) :]

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def write_hparams(folder: Path, *, settings: Mapping[str, str], name: str, finished: bool) -> None:
    """Write the settings of one job for TensorBoard's HParams page; they replace the job's earlier ones.

    The name of the file contains the token of the run, if it has one: other such files are kept.

    To view them: tensorboard --logdir SWEEP

    Args:
        folder: the folder of the job's own event files; its scalars become columns next to the settings.
        settings: key -> value as typed; numbers become numbers, which TensorBoard draws on axes.
        name: the name of the job.
        finished: whether it ended regularly.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # noqa: PLC0415 - for a sweep's end only

    owner = OwnershipToken.find(folder.parent)
    suffix = f".{_HPARAMS}" if owner is None else f".{owner.token}.{_HPARAMS}"
    ours = re.compile(rf"events\.out\.tfevents\.\d+\..*\.\d+\.\d+{re.escape(suffix)}")  # as EventFile names them
    for earlier in folder.glob(f"events.out.tfevents.*{suffix}"):
        if ours.fullmatch(earlier.name):
            earlier.unlink()
    now = time.time()
    start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=now)
    for key, typed in settings.items():
        _put(start.hparams[key], typed)
    status = api_pb2.Status.STATUS_SUCCESS if finished else api_pb2.Status.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
    events = EventFile(folder, suffix=suffix)
    started = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    ended = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    for tag, content in ((metadata.SESSION_START_INFO_TAG, started), (metadata.SESSION_END_INFO_TAG, ended)):
        description = metadata.create_summary_metadata(content)
        events.add(Summary(value=[Summary.Value(tag=tag, metadata=description, tensor=metadata.NULL_TENSOR)]))
    events.close()


def _put(value: Any, text: str) -> None:
    if text in ("true", "false"):
        value.bool_value = text == "true"
        return
    try:
        value.number_value = float(text)
    except ValueError:
        value.string_value = text
