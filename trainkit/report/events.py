"""Write TensorBoard event files: checksummed records, each one a protocol buffer of TensorBoard's.

TensorBoard's own writer needs a thread and 0.2 s to import.

Source: the TFRecord format (tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DataClass, HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DataType
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from trainkit.storage import naming
from trainkit.trainer.ownership import OwnershipToken

_HPARAMS = "hparams"


class EventFile:
    """A file of scalars, images and texts for TensorBoard; `flush` makes them visible.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     events = EventFile(Path(folder))
        ...     events.scalars({"train/loss": 0.5}, step=10, wall_time=1.75e9)
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
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}{suffix}"
        self._path = folder / name
        with naming(self._path):
            self._file = self._path.open("xb", buffering=0)
        self._pending = bytearray()
        self._add(Event(wall_time=now, file_version="brain.Event:2"))
        if purge_after is not None:
            # A session that starts at step s invalidates s and all later steps.
            log = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=now, step=purge_after + 1, session_log=log))
        self.flush()

    def scalars(self, values: Mapping[str, float], *, step: int, wall_time: float) -> None:
        """Add one point to each named curve, with the time of its measurement."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(wall_time=wall_time, step=step, summary=Summary(value=points)))

    def image(self, name: str, png: bytes, *, height: int, width: int, step: int, wall_time: float) -> None:
        """Add an image, as PNG."""
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        value = Summary.Value(tag=name, image=image)
        self._add(Event(wall_time=wall_time, step=step, summary=Summary(value=[value])))

    def histogram(self, name: str, counts: Mapping[int, int], *, step: int, wall_time: float) -> None:
        """Add the number of occurrences of each whole number."""
        numbers = range(min(counts), max(counts) + 1)
        sums = [float(sum(count * number**power for number, count in counts.items())) for power in (1, 2)]
        ends = (numbers[0], numbers[-1], sums[0], sums[1])
        limits, found = [number + 0.5 for number in numbers], [counts.get(number, 0) for number in numbers]
        self.buckets(name, limits, found, ends=ends, step=step, wall_time=wall_time)

    def buckets(
        self,
        name: str,
        limits: Sequence[float],
        counts: Sequence[int],
        *,
        ends: tuple[float, float, float, float],
        step: int,
        wall_time: float,
    ) -> None:
        """Add a histogram.

        Args:
            name: the tag.
            limits: the upper limit of each bucket, ascending.
            counts: the values in each bucket.
            ends: the smallest and the largest value, the sum of the values and the sum of their squares.
            step: the step of the histogram.
            wall_time: seconds since the epoch.
        """
        low, high, total, squares = ends
        sums = {"num": sum(counts), "sum": total, "sum_squares": squares}
        histo = HistogramProto(min=low, max=high, **sums, bucket_limit=limits, bucket=counts)
        value = Summary.Value(tag=name, histo=histo)
        self._add(Event(wall_time=wall_time, step=step, summary=Summary(value=[value])))

    def plugin(self, tag: str, content: Any, *, wall_time: float) -> None:
        """Add data of TensorBoard's HParams page."""
        from tensorboard.plugins.hparams import metadata  # noqa: PLC0415 - for a sweep's end only

        value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
        self._add(Event(wall_time=wall_time, summary=Summary(value=[value])))

    def text(self, name: str, markdown: str, *, step: int, wall_time: float) -> None:
        """Add a text, as Markdown."""
        plugin = SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name="text"), data_class=DataClass.DATA_CLASS_TENSOR
        )
        tensor = TensorProto(dtype=DataType.DT_STRING, tensor_shape=TensorShapeProto(), string_val=[markdown.encode()])
        value = Summary.Value(tag=name, metadata=plugin, tensor=tensor)
        self._add(Event(wall_time=wall_time, step=step, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Write what was added since the last flush.

        Raises:
            StorageError: it cannot be written, and is dropped: a truncated record makes all later ones unreadable.
        """
        pending, self._pending = memoryview(self._pending), bytearray()
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

    def _add(self, event: Event) -> None:
        record = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        self._pending += length + _checksum(length) + record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


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

    owner = OwnershipToken.found(folder.parent)
    suffix = f".{_HPARAMS}" if owner is None else f".{owner.token}.{_HPARAMS}"
    ours = re.compile(rf"events\.out\.tfevents\.\d+\..*\.\d+\.\d+{re.escape(suffix)}")  # as EventFile names them
    for earlier in folder.glob(f"events.out.tfevents.*{suffix}"):
        if ours.fullmatch(earlier.name):
            earlier.unlink()
    now = time.time()
    start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=now)
    for key, text in settings.items():
        _put(start.hparams[key], text)
    status = api_pb2.Status.STATUS_SUCCESS if finished else api_pb2.Status.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
    events = EventFile(folder, suffix=suffix)
    started = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    events.plugin(metadata.SESSION_START_INFO_TAG, started, wall_time=now)
    ended = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    events.plugin(metadata.SESSION_END_INFO_TAG, ended, wall_time=now)
    events.close()


def _put(value: Any, text: str) -> None:
    if text in ("true", "false"):
        value.bool_value = text == "true"
        return
    try:
        value.number_value = float(text)
    except ValueError:
        value.string_value = text
