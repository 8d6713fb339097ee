"""The files of the last collectives of each rank: their layout, and how those of several ranks are compared."""

from __future__ import annotations

import mmap
import socket
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from trainkit.errors import UnreadableError
from trainkit.reading import read_bytes

_SLOTS: Final = 64
_SHOWN: Final = 3
"""Collectives of a rank that a message shows."""
HEAD: Final = struct.Struct("<qq")  # the host, so that no rank compares with a file that another host writes; the pid
_TEXT_BYTES: Final = 160
_ENTRY: Final = struct.Struct(f"<qQQQqH{_TEXT_BYTES}s")  # number, group, sequence, kind, step, length, text
_CHECKSUM: Final = struct.Struct("<I")  # an entry that is just being written fails it
_STRIDE: Final = _ENTRY.size + _CHECKSUM.size
_OFFSET: Final = 64
SIZE: Final = _OFFSET + _SLOTS * _STRIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that a rank has called."""

    number: int
    """Counts the collectives of the rank."""
    group: int
    """A hash of the name and the ranks of the process group."""
    sequence: int
    """Counts the collectives of the rank in this group."""
    kind: int
    """A hash of the properties that must be equal on all ranks."""
    step: int
    """Updates completed; -1 before the first step."""
    text: str
    """Operation, shape, dtype, and where it was called."""

    def __str__(self) -> str:
        when = "before the first step" if self.step < 0 else f"in step {self.step}"
        return f"{self.text}, {when}"


def read_collectives(path: Path) -> list[Collective]:
    """Return the last collectives that a rank has called, in order; none where the file is absent or damaged."""
    try:
        content = read_bytes(path, limit=SIZE)
    except UnreadableError:
        return []
    found = map(partial(read_record, content), range(_SLOTS)) if len(content) == SIZE else ()
    return sorted(filter(None, found), key=lambda one: one.number)


def waited_for(ranks: Iterable[int], file_of: Callable[[int], Path]) -> frozenset[int]:
    """Return the ranks that have not called a collective that other ranks of the same group have called."""
    reached: dict[int, dict[int, int]] = {}
    for rank in ranks:
        for one in read_collectives(file_of(rank)):
            of_group = reached.setdefault(one.group, {})
            of_group[rank] = max(one.sequence, of_group.get(rank, 0))
    return frozenset(
        rank for of_group in reached.values() for rank, last in of_group.items() if last < max(of_group.values())
    )


def slot_of(group: int, sequence: int) -> int:
    """Return the slot of a collective."""
    return (group + sequence) % _SLOTS


def write_record(memory: mmap.mmap, one: Collective) -> None:
    """Write a collective into its slot."""
    text = one.text.encode()
    text = text if len(text) <= _TEXT_BYTES else text[:60] + b"..." + text[63 - _TEXT_BYTES :]
    body = _ENTRY.pack(one.number, one.group, one.sequence, one.kind, one.step, len(text), text)
    start = _OFFSET + slot_of(one.group, one.sequence) * _STRIDE
    memory[start : start + _STRIDE] = body + _CHECKSUM.pack(zlib.crc32(body))


def read_record(memory: mmap.mmap | bytes, slot: int) -> Collective | None:
    """Return the collective in a slot; None where there is none, or one that is just being written."""
    start = _OFFSET + slot * _STRIDE
    entry = bytes(memory[start : start + _STRIDE])
    body, (checksum,) = entry[: _ENTRY.size], _CHECKSUM.unpack_from(entry, _ENTRY.size)
    number, group, sequence, kind, step, length, text = _ENTRY.unpack(body)
    if not number or zlib.crc32(body) != checksum:
        return None
    shown = text[:length].decode(errors="replace")
    return Collective(number=number, group=group, sequence=sequence, kind=kind, step=step, text=shown)


def mismatch(one: tuple[int, Collective], other: tuple[int, Collective], file_of: Callable[[int], Path]) -> str:
    """Return the error message for two ranks that call different collectives."""
    calls = "; ".join(f"{_name(rank, file_of(rank))} calls {collective}" for rank, collective in (one, other))
    rule = "All ranks of a group must call the same collectives in the same order, with the same shapes and dtypes."
    lines = [f"the ranks call different collectives: {calls}. {rule}"]
    for rank in sorted((one[0], other[0])):
        last = read_collectives(file_of(rank))[-_SHOWN:]
        lines += [f"The last collectives of rank {rank}:", *(f"  {collective}" for collective in last)]
    return "\n".join(lines)


def _name(rank: int, file: Path) -> str:
    try:
        return f"rank {rank} (pid {HEAD.unpack_from(read_bytes(file, limit=SIZE))[1]} on {socket.gethostname()})"
    except (UnreadableError, struct.error):
        return f"rank {rank}"
