"""One safetensors file: hashed while it is written, and while it is read.

An own writer and reader of the format (an 8-byte length, a JSON header, raw bytes): the bytes are hashed on their way,
so that a checkpoint is read once, never mapped, and nothing of it is kept that was not verified.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from trainkit.engine.checkpoint.dtypes import DTYPES, NAMES, bytes_of
from trainkit.engine.manifest import FileRecord, damaged

__all__ = ["read_tensors", "write_bytes", "write_tensors"]

_CHUNK: Final = 8 << 20
_MAX_HEADER: Final = 100_000_000  # the format's own limit


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors to a new file, flushed to the disk.

    Raises:
        OSError: the disk said no; the file is then incomplete.
    """
    # Widest dtypes first: every tensor is then aligned to its own element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        writer = _Writer(file)
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            writer.write(bytes_of(tensors[name]))
        return writer.finish()


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a small new file, flushed to the disk."""
    with path.open("xb") as file:
        writer = _Writer(file)
        writer.write(memoryview(content))
        return writer.finish()


class _Writer:
    """Counts and hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, content: memoryview) -> None:
        for start in range(0, len(content), _CHUNK):
            piece = content[start : start + _CHUNK]
            self._digest.update(piece)
            self._file.write(piece)
        self._num_bytes += len(content)

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())


def read_tensors(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Read a whole file into memory of our own, and verify it.

    The header is untrusted until the hash is right: sizes are bounded by the size of the file.

    Raises:
        CheckpointError: the bytes are not those that were written.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path, record).read()
    except OSError as error:
        raise damaged(path.parent, f"{path.name} cannot be read ({error})") from None


class _Reader:
    def __init__(self, file: BinaryIO, path: Path, record: FileRecord) -> None:
        self._file = file
        self._path = path
        self._record = record
        self._digest = hashlib.sha256()

    def read(self) -> dict[str, Tensor]:
        try:
            tensors = self._tensors()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError):  # a crafted header
            raise self._damage() from None
        if self._file.read(1) or self._digest.hexdigest() != self._record.sha256:
            raise self._damage()
        return tensors

    def _tensors(self) -> dict[str, Tensor]:
        length = int.from_bytes(self._take(8), "little")
        if length > min(_MAX_HEADER, self._record.num_bytes - 8):
            raise self._damage()
        entries = self._entries(self._take(length), self._record.num_bytes - 8 - length)
        tensors = {}
        for name, dtype, shape, num_bytes in entries:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            self._fill(buffer.numpy().data)
            tensors[name] = buffer.view(dtype).reshape(shape)
        return tensors

    def _entries(self, text: bytes, data_bytes: int) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
        """The tensors in the order of their bytes, which must follow each other without a gap."""
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries, at = [], 0
        for name, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            (begin, end), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], tuple(entry["shape"])
            if begin != at or end - begin != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
                raise self._damage()
            entries.append((name, dtype, shape, end - begin))
            at = end
        if at != data_bytes:
            raise self._damage()
        return entries

    def _take(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        if len(content) != num_bytes:
            raise self._damage()
        self._digest.update(content)
        return content

    def _fill(self, target: memoryview) -> None:
        for start in range(0, len(target), _CHUNK):
            piece = target[start : start + _CHUNK]
            if self._file.readinto(piece) != len(piece):  # type: ignore[attr-defined]  # BufferedReader has it
                raise self._damage()
            self._digest.update(piece)

    def _damage(self) -> Exception:
        return damaged(self._path.parent, f"{self._path.name} is not what was written (SHA-256 differs)")
