"""Record the last collectives of each rank, and refuse one that differs from what another rank calls in its place.

Before each call, every rank writes operation, size, dtype, step and the line of the user's code into a small file that
the other ranks of its host have mapped. Of two ranks that call different collectives, the later one finds the call of
the other there and raises; otherwise gloo would end the process by SIGABRT, or both would wait for ever. The file
outlives the process, so that the parent can read it.

PyTorch's own recorder keeps the collectives of NCCL in memory, for a process that still responds, and the checks of
TORCH_DISTRIBUTED_DEBUG=DETAIL cost an exchange more for each collective.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist
from torch import Tensor

from trainkit.cluster.host import host_id
from trainkit.errors import CollectiveMismatchError, UnreadableError
from trainkit.reading import open_descriptor, open_regular
from trainkit.strategies.collective_records import HEAD, SIZE, Collective, mismatch, read_record, slot_of, write_record

_NAMES: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
"""Methods of a process group -> what they are called in torch.distributed."""
_OF_ONESIZE: Final = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "exchange of gradients"}
)
"""Collectives whose tensors have one size and dtype on all ranks; of the others only the names are compared."""


class FlightRecorder:
    """Records the collectives of this process while its block runs."""

    def __init__(self, file_of: Callable[[int], Path], rank: int, step: Callable[[], int]) -> None:
        self._file_of, self._rank, self._step = file_of, rank, step
        self._number = 0
        self._groups: dict[str, tuple[int, list[int]]] = {}
        self._sequences: dict[int, int] = {}
        self._peers: dict[int, mmap.mmap | None] = {}

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
        """Write down a collective that is about to be called.

        Raises:
            CollectiveMismatchError: another rank of this host has called another one in its place.
        """
        group_id, ranks = self._group(group)
        module, place = _caller()
        shape = "" if tensor is None else f" of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        alike = f"{tensor.numel()} {tensor.dtype}" if tensor is not None and name in _OF_ONESIZE else ""
        sequence = self._sequences[group_id] = self._sequences.get(group_id, 0) + 1
        self._number += 1
        own = Collective(
            number=self._number,
            group=group_id,
            sequence=sequence,
            kind=_hash(f"{name} {alike} {module.startswith('trainkit.')}"),
            step=self._step(),
            text=f"{name}{shape} at {place}",
        )
        write_record(self._memory, own)
        for rank in ranks:
            if rank != self._rank and (memory := self._peer(rank)) is not None:
                self._compare(own, rank, memory)

    def _group(self, group: dist.ProcessGroup) -> tuple[int, list[int]]:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[name] = (_hash(f"{name} {ranks}"), ranks)
        return self._groups[name]

    def _peer(self, rank: int) -> mmap.mmap | None:
        """Return the memory of another rank; None where that is on another host."""
        if rank not in self._peers:
            self._peers[rank] = None
            with contextlib.suppress(OSError, ValueError, UnreadableError), open_regular(self._file_of(rank)) as file:
                memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
                if HEAD.unpack_from(memory, 0)[0] == host_id():
                    self._peers[rank] = memory
        return self._peers[rank]

    def _compare(self, own: Collective, rank: int, memory: mmap.mmap) -> None:
        theirs = read_record(memory, slot_of(own.group, own.sequence))
        if theirs is None or (theirs.group, theirs.sequence) != (own.group, own.sequence) or theirs.kind == own.kind:
            return  # also where the other rank has not come so far: it compares when it does
        raise CollectiveMismatchError(mismatch((self._rank, own), (rank, theirs), self._file_of))


_current: FlightRecorder | None = None


def note_exchange(tensor: Tensor) -> None:
    """Record an exchange between all ranks that uses no process group.

    Raises:
        CollectiveMismatchError: another rank of this host has called a collective in its place.
    """
    if _current is not None and dist.group.WORLD is not None:
        _current.record(dist.group.WORLD, "exchange of gradients", tensor)


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
    found: Any = args[1] if gives_second else args[0] if args else None
    while isinstance(found, list | tuple):
        found = found[0] if found else None
    return found if isinstance(found, Tensor) else None


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
