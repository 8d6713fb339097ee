"""Record the last collectives of each rank, and refuse one that differs from the call of another rank in the same
place.

Before each call, every rank writes operation, size, dtype, step and the line of the user's code into a small file that
the other ranks of its host have mapped. Of two ranks that call different collectives, the later one finds the call of
the other there and raises; otherwise gloo would end the process by SIGABRT, or both would wait for ever. The file
outlives the process, so that the parent can read it.

PyTorch's own recorder keeps the collectives in memory, for a process that still responds, and the checks of
TORCH_DISTRIBUTED_DEBUG=DETAIL cost one more exchange for each collective.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist
from torch import Tensor

from trainkit.cluster.host import host_id
from trainkit.errors import CollectiveMismatchError, UnreadableError
from trainkit.files import open_descriptor, open_regular, read_bytes

_SLOTS: Final = 64
_SHOWN: Final = 3
"""Number of collectives of a rank that a message shows."""
HEAD: Final = struct.Struct("<qq")  # the host, so that no rank compares with a file of another host; the pid
_TEXT_BYTES: Final = 160
_ENTRY: Final = struct.Struct(f"<qQQQqH{_TEXT_BYTES}s")  # number, group, sequence, kind, step, length, text
_CHECKSUM: Final = struct.Struct("<I")  # an entry that is being written fails the check
_STRIDE: Final = _ENTRY.size + _CHECKSUM.size
_OFFSET: Final = 64
SIZE: Final = _OFFSET + _SLOTS * _STRIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that a rank has called."""

    number: int
    """Number of the collective, counted per rank."""
    group: int
    """A hash of the name and the ranks of the process group."""
    sequence: int
    """Number of the collective, counted per rank and group."""
    kind: int
    """A hash of the properties that must be equal on all ranks."""
    step: int
    """Updates completed; -1 before the first step."""
    text: str
    """Operation, shape, dtype, and the line of the call."""

    def __str__(self) -> str:
        when = "before the first step" if self.step < 0 else f"in step {self.step}"
        return f"{self.text}, {when}"


def read_collectives(path: Path) -> list[Collective]:
    """Return the last collectives that a rank has called, in order; none if the file is absent or damaged."""
    try:
        content = read_bytes(path, limit=SIZE)
    except UnreadableError:
        return []
    calls = map(partial(read_record, content), range(_SLOTS)) if len(content) == SIZE else ()
    return sorted(filter(None, calls), key=lambda call: call.number)


def waited_for(ranks: Iterable[int], file_of: Callable[[int], Path]) -> frozenset[int]:
    """Return the ranks that have not called a collective that other ranks of the same group have called."""
    reached: dict[int, dict[int, int]] = {}
    for rank in ranks:
        for call in read_collectives(file_of(rank)):
            last_of = reached.setdefault(call.group, {})
            last_of[rank] = max(call.sequence, last_of.get(rank, 0))
    return frozenset(
        rank for last_of in reached.values() for rank, sequence in last_of.items() if sequence < max(last_of.values())
    )


def slot_of(group: int, sequence: int) -> int:
    """Return the slot of a collective."""
    return (group + sequence) % _SLOTS


def write_record(memory: mmap.mmap, call: Collective) -> None:
    """Write a collective into its slot."""
    text = call.text.encode()
    text = text if len(text) <= _TEXT_BYTES else text[:60] + b"..." + text[63 - _TEXT_BYTES :]
    body = _ENTRY.pack(call.number, call.group, call.sequence, call.kind, call.step, len(text), text)
    start = _OFFSET + slot_of(call.group, call.sequence) * _STRIDE
    memory[start : start + _STRIDE] = body + _CHECKSUM.pack(zlib.crc32(body))


def read_record(memory: mmap.mmap | bytes, slot: int) -> Collective | None:
    """Return the collective in a slot; None if there is none, or if it is being written."""
    start = _OFFSET + slot * _STRIDE
    entry = bytes(memory[start : start + _STRIDE])
    body, (checksum,) = entry[: _ENTRY.size], _CHECKSUM.unpack_from(entry, _ENTRY.size)
    number, group, sequence, kind, step, length, text = _ENTRY.unpack(body)
    if not number or zlib.crc32(body) != checksum:
        return None
    shown = text[:length].decode(errors="replace")
    return Collective(number=number, group=group, sequence=sequence, kind=kind, step=step, text=shown)


def mismatch(first: tuple[int, Collective], second: tuple[int, Collective], file_of: Callable[[int], Path]) -> str:
    """Return the error message for two ranks that call different collectives."""
    calls, lines = [], []
    for rank, collective in (first, second):
        process = f"rank {rank}"
        with contextlib.suppress(UnreadableError, struct.error):
            pid = HEAD.unpack_from(read_bytes(file_of(rank), limit=SIZE))[1]
            process = f"rank {rank} (pid {pid} on {socket.gethostname()})"
        calls.append(f"{process} calls {collective}")
    for rank in sorted((first[0], second[0])):
        last = read_collectives(file_of(rank))[-_SHOWN:]
        lines += [f"The last collectives of rank {rank}:", *(f"  {collective}" for collective in last)]
    rule = "All ranks of a group must call the same collectives in the same order, with the same shapes and dtypes."
    return "\n".join([f"the ranks call different collectives: {'; '.join(calls)}. {rule}", *lines])


_NAMES: Final = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "barrier": "barrier",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor", "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single",
}  # fmt: skip
"""Methods of a process group -> their names in torch.distributed."""
_OF_ONESIZE: Final = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "exchange of gradients"}
    | {"sum"}
)
"""Collectives whose tensors have one size and dtype on all ranks; for all others, only the names are compared."""


class FlightRecorder:
    """Records the collectives of this process while its block runs."""

    def __init__(self, file_of: Callable[[int], Path], rank: int, step: Callable[[], int]) -> None:
        self._file_of, self._rank, self._step = file_of, rank, step
        self._number = 0
        self._groups: dict[str, tuple[int, list[int]]] = {}
        self._sequences: dict[int, int] = {}
        self._peers: dict[int, mmap.mmap | None] = {}
        self._looks: dict[int, int] = {}  # rank -> number of attempts to read its file

    def __enter__(self) -> Self:
        """Create the file, and record every collective that Python code calls from now on."""
        global _current
        path = self._file_of(self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        HEAD.pack_into(self._memory, 0, host_id(), os.getpid())
        self._previous, _current = _current, self
        self._methods = {name: vars(dist.ProcessGroup)[name] for name in _NAMES if name in vars(dist.ProcessGroup)}
        for name in self._methods:
            setattr(dist.ProcessGroup, name, _recorded(getattr(dist.ProcessGroup, name), _NAMES[name]))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording; the file stays."""
        global _current  # noqa: PLW0603 - see above
        for name, method in self._methods.items():
            setattr(dist.ProcessGroup, name, method)
        _current = self._previous
        for memory in (self._memory, *self._peers.values()):
            if memory is not None:
                memory.close()
        self._peers.clear()

    def record(self, group: dist.ProcessGroup, name: str, tensor: Tensor | None) -> None:
        """Record a collective before it is called.

        Raises:
            CollectiveMismatchError: another rank of this host has called a different one in the same place.
        """
        if group.group_name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[group.group_name] = (_hash(f"{group.group_name} {ranks}"), ranks)
        group_id, ranks = self._groups[group.group_name]
        module, location = _caller()
        shape = "" if tensor is None else f" of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        alike = f"{tensor.numel()} {tensor.dtype}" if tensor is not None and name in _OF_ONESIZE else ""
        sequence = self._sequences[group_id] = self._sequences.get(group_id, 0) + 1
        self._number += 1
        call = Collective(
            number=self._number,
            group=group_id,
            sequence=sequence,
            kind=_hash(f"{name} {alike} {module.startswith(_OURS)}"),
            step=self._step(),
            text=f"{name}{shape} at {location}",
        )
        write_record(self._memory, call)
        for rank in ranks:
            if rank == self._rank or (memory := self._peer(rank)) is None:
                continue
            other = read_record(memory, slot_of(group_id, sequence))  # None: that rank compares when it makes the call
            if other is not None and (other.group, other.sequence) == (group_id, sequence) and other.kind != call.kind:
                raise CollectiveMismatchError(mismatch((self._rank, call), (rank, other), self._file_of))

    def _peer(self, rank: int) -> mmap.mmap | None:
        """Return the memory of another rank; None if that rank is on another host, or does not record yet."""
        if rank not in self._peers:
            memory = None
            with contextlib.suppress(OSError, ValueError, UnreadableError), open_regular(self._file_of(rank)) as file:
                memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
            host = 0 if memory is None else HEAD.unpack_from(memory, 0)[0]
            self._looks[rank] = self._looks.get(rank, 0) + 1
            if host == 0 and self._looks[rank] < _SLOTS:  # it may begin later: groups can connect before that
                return None
            self._peers[rank] = memory if host == host_id() else None
        return self._peers[rank]


_current: FlightRecorder | None = None


def note_exchange(tensor: Tensor, name: str = "exchange of gradients", group: dist.ProcessGroup | None = None) -> None:
    """Record an exchange that calls no collective of torch, or whose tensors have one size on all ranks.

    Args:
        tensor: the tensor that this rank sends.
        name: the exchange.
        group: the ranks that take part; None: all.

    Raises:
        CollectiveMismatchError: another rank of this host has called a different collective in the same place.
    """
    if _current is not None and (taking_part := group or dist.group.WORLD) is not None:
        _current.record(taking_part, name, tensor)


def _recorded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.record(group, name, _tensor_in(args, name))
        return method(group, *args, **kwargs)

    return call


def _tensor_in(args: Sequence[Any], name: str) -> Tensor | None:
    """Return the tensor that this rank sends, for reduce_scatter the one that it receives; None: it sends none."""
    gives_second = name.startswith(("all_gather", "gather", "scatter", "all_to_all")) and len(args) > 1
    value: Any = args[1] if gives_second else args[0] if args else None
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    return value if isinstance(value, Tensor) else None


_OURS: Final = ("trainkit.", "torch.")
"""Modules of callers that count as trainkit: a callback of torch (as in PowerSGD) may run below a call of trainkit or
in a thread of torch.
"""


def _caller() -> tuple[str, str]:
    """Return the module and the line that called a collective: the first beyond torch."""
    frame = sys._getframe(2)  # noqa: SLF001 - the cheap way to look at the stack
    name = ""
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("torch.") and name != __name__:
            break
        frame = frame.f_back
    return name, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _hash(text: str) -> int:
    data = text.encode()
    return zlib.crc32(data) << 32 | zlib.adler32(data)
