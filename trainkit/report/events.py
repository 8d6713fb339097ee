"""Write TensorBoard event files directly.

TensorBoard's own writer takes 6 MB, 0.05 s and a thread, and uses the time of writing as the time of an event. An event
file is a sequence of checksummed records, each one small protocol buffer.

Source: tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto, and the TFRecord format
(tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.storage import naming

__all__ = ["EventFile"]


class EventFile:
    """A file of scalars and images for TensorBoard; `flush` makes them visible.

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
        self._add(_event(now, None, _bytes(3, b"brain.Event:2")))
        if purge_after is not None:
            # A session that starts at step s invalidates s and all later steps.
            self._add(_event(now, purge_after + 1, _bytes(7, b"\x08\x01")))
        self.flush()

    def scalars(self, values: Mapping[str, float], *, step: int, wall_time: float) -> None:
        """Add one point to each named curve, with the time of its measurement."""
        parts = [
            _bytes(1, _bytes(1, name.encode()) + _tag(2, 5) + struct.pack("<f", value))
            for name, value in values.items()
        ]
        self._add(_event(wall_time, step, _bytes(5, b"".join(parts))))

    def image(self, name: str, png: bytes, *, height: int, width: int, step: int, wall_time: float) -> None:
        """Add an image, as PNG."""
        image = _number(1, height) + _number(2, width) + _number(3, 3) + _bytes(4, png)
        value = _bytes(1, name.encode()) + _bytes(4, image)
        self._add(_event(wall_time, step, _bytes(5, _bytes(1, value))))

    def histogram(self, name: str, counts: Mapping[int, int], *, step: int, wall_time: float) -> None:
        """Add the number of occurrences of each whole number."""
        numbers = range(min(counts), max(counts) + 1)
        seen = [float(counts.get(number, 0)) for number in numbers]
        moments = [sum(count * number**power for number, count in counts.items()) for power in range(3)]
        parts = [float(numbers[0]), float(numbers[-1]), *map(float, moments)]
        fields = b"".join(_tag(place, 1) + struct.pack("<d", value) for place, value in enumerate(parts, start=1))
        limits = struct.pack(f"<{len(seen)}d", *(number + 0.5 for number in numbers))
        fields += _bytes(6, limits) + _bytes(7, struct.pack(f"<{len(seen)}d", *seen))
        value = _bytes(1, name.encode()) + _bytes(5, fields)
        self._add(_event(wall_time, step, _bytes(5, _bytes(1, value))))

    def summary(self, message: bytes, *, wall_time: float) -> None:
        """Add an encoded summary for a plugin of TensorBoard."""
        self._add(_event(wall_time, None, _bytes(5, message)))

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

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._pending += length + _masked_crc(length) + event + _masked_crc(event)


def _event(wall_time: float, step: int | None, what: bytes) -> bytes:
    return _tag(1, 1) + struct.pack("<d", wall_time) + (b"" if step is None else _number(2, step)) + what


def _tag(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C of a record, rotated and shifted as the format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
