"""All-reduce through shared memory: for CPU processes of one host, at the speed of a copy.

The gradients of a rank lie in its own slot. Each rank sums one slice of all slots, in the order of the ranks, and
copies the whole result over its slot. There are two barriers per step: all slots are written, all slices are summed.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.cluster.host import ProcessId, host_id
from trainkit.errors import TrainingError
from trainkit.objectives.base import Collective
from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.reducers.vector import VectorReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

_LINE: Final = 64
"""Size of a cache line: no two ranks write into the same one."""
_WORDS: Final = _LINE // 8
_ARRIVED: Final = 0
"""Index in the line of a rank: number of its arrivals at a barrier."""
_GONE: Final = 1
"""Index in the line of a rank: 1 after it has left."""
_PAGE: Final = 4096
_REMEDY: Final = "Use strategy.reduce=backend."
_SPINS: Final = 2000
"""Reads of a counter before the first sleep, about 0.1 ms: a rank that arrives soon needs no wake-up."""
_SLEEP_S: Final = 5e-5
_LONGEST_SLEEP_S: Final = 1e-3
_CHECK_S: Final = 0.05
"""Seconds between two checks of a waiting rank that the other one is alive."""


class SharedMemorySegment:
    """One slot per rank and one total, in anonymous memory mapped by all ranks; construction is collective.

    The memory is a memfd of rank 0 that the others open through /proc: it never has a name, so nothing is left behind,
    even if a process is killed, and no limit of /dev/shm applies.

    Memory order: a rank writes data, then its own counter (one aligned 8-byte store); another reads the counter (one
    aligned 8-byte load), then data. x86-64 keeps the order of stores among stores and of loads among loads. Other
    processors do not; there, releasing and acquiring a lock between the two orders them, because both have release and
    acquire semantics. Tested on x86-64.

    Args:
        collective: the ranks.
        numel: elements of a slot.
        dtype: their dtype.
        names: the number of each rank in the run, for messages; empty: they are all ranks of it.

    Raises:
        TrainingError: the ranks are not on one host, or there is not enough memory.
    """

    def __init__(self, collective: Collective, *, numel: int, dtype: torch.dtype, names: Sequence[int] = ()) -> None:
        self._rank, self._num_ranks = collective.rank, collective.num_ranks
        self._names = names or range(self._num_ranks)
        stride = -(-numel * dtype.itemsize // _PAGE) * _PAGE
        head = -(-self._num_ranks * _LINE // _PAGE) * _PAGE
        self._marks, descriptor = _share_memory(collective, head + (self._num_ranks + 1) * stride, self._names)
        try:
            memory = mmap.mmap(descriptor, head + (self._num_ranks + 1) * stride)
        finally:
            os.close(descriptor)
        self._words = memoryview(memory)[:head].cast("q")
        starts = [head + index * stride for index in range(self._num_ranks + 1)]
        views = [torch.frombuffer(memory, dtype=dtype, count=numel, offset=start) for start in starts]
        self.slots, self.total = views[:-1], views[-1]
        self._barriers = 0
        self._order_lock = threading.Lock()

    def barrier(self, timeout_s: float) -> None:
        """Barrier: wait until every rank has arrived as often as this one; their earlier writes are visible afterwards.

        Raises:
            TrainingError: a rank has ended, has left, or did not arrive in time; names it.
        """
        self._barriers += 1
        self._order()
        self._words[self._rank * _WORDS + _ARRIVED] = self._barriers
        for rank in range(self._num_ranks):
            self._await(rank, timeout_s)
        self._order()

    def _order(self) -> None:
        """Prevent reordering of memory accesses before and after this call: a release, then an acquire."""
        for _ in range(2):
            with self._order_lock:
                pass

    def _await(self, rank: int, timeout_s: float) -> None:
        words, index, expected = self._words, rank * _WORDS + _ARRIVED, self._barriers
        for _ in range(_SPINS):
            if words[index] >= expected:
                return
        begun = looked = time.monotonic()
        pause = _SLEEP_S
        while words[index] < expected:
            time.sleep(pause)
            now = time.monotonic()
            if now - looked <= _CHECK_S:
                continue
            looked, pause = now, _LONGEST_SLEEP_S
            lost = words[rank * _WORDS + _GONE] == 1 or not self._marks[rank].lives
            if words[index] >= expected:
                return  # it arrived, and ended afterwards
            name, waiting = self._names[rank], self._names[self._rank]
            # Both report the end of another rank, not a failure of this one: the cause marks the error as secondary.
            if lost:
                cause: ConnectionError = ConnectionResetError(f"rank {name} has left")
                raise TrainingError(f"rank {name} ended while rank {waiting} waited for its gradients.") from cause
            if now - begun > timeout_s:
                cause = ConnectionAbortedError(f"rank {name} did not arrive")
                raise TrainingError(
                    f"rank {name} sent no gradients to rank {waiting} in {timeout_s:g} s (strategy.timeout_s)."
                ) from cause

    def close(self) -> None:
        """Mark this rank as left for the others."""
        self._words[self._rank * _WORDS + _GONE] = 1


def _share_memory(collective: Collective, size: int, names: Sequence[int]) -> tuple[list[ProcessId], int]:
    """Return every rank's process id, and an open descriptor of the first rank's memory; collective."""
    process = ProcessId.of(os.getpid())
    descriptor = _make(size) if collective.rank == 0 else -1
    row = torch.tensor([[host_id(), process.pid, process.started, descriptor]], dtype=torch.int64)
    rows: list[list[int]] = torch.cat(collective.gather(row)).tolist()
    host, pid, _, shared = rows[0]
    away = [rank for rank, entry in enumerate(rows) if entry[0] != host]
    if collective.rank > 0 and not away and shared >= 0:
        descriptor = _open(f"/proc/{pid}/fd/{shared}")
    opened = torch.tensor([int(descriptor >= 0)])
    could = torch.cat(collective.gather(opened)).tolist()  # rank 0 keeps it open until here
    if all(could) and not away:
        return [ProcessId(entry[1], entry[2]) for entry in rows], descriptor
    if descriptor >= 0:
        os.close(descriptor)
    if away:
        reason = f"rank {names[away[0]]} is not on the host of rank {names[0]}, whose memory it would share"
    elif shared < 0:
        reason = f"there are no {size / 2**20:.0f} MiB of memory to share gradients in"
    else:
        reason = f"rank {names[could.index(0)]} may not open the memory that rank {names[0]} would share"
    raise TrainingError(f"{reason}. {_REMEDY}")


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _make(size: int) -> int:
    """Return a descriptor of new, allocated memory; below 0 if there is not enough."""
    if size > available_bytes():
        return -1  # a memfd has no limit of its own: too large a request would make the kernel kill a process
    descriptor = os.memfd_create("trainkit", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def available_bytes() -> int:
    """Return the bytes that new allocations may take without swapping, as estimated by Linux."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def shared_memory_obstacle(collective: Collective, size: int) -> str | None:
    """Return why the ranks cannot sum `size` bytes each in shared memory, by a try; None if they can; collective.

    Some containers forbid a process to open the memory of another.
    """
    try:
        SharedMemorySegment(collective, numel=max(size, 1), dtype=torch.uint8).close()
    except TrainingError as error:
        return str(error).removesuffix(f". {_REMEDY}")
    return None


class SharedMemoryReducer(VectorReducer):
    """Sums over the ranks of one host through memory that all of them have mapped.

    Args:
        collective: the ranks to sum over.
        timeout_s: seconds to wait for another rank in an exchange.
        group: the group that they form; None: all ranks of the run.
    """

    def __init__(self, collective: Collective, *, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._collective, self._timeout_s, self._group = collective, timeout_s, group
        self._segment: SharedMemorySegment | None = None

    def allocate(self, packing: FlatBuffer) -> Tensor:
        """Return the slot of this rank; collective."""
        collective = self._collective
        names = () if self._group is None else dist.get_process_group_ranks(self._group)
        segment = SharedMemorySegment(collective, numel=packing.numel, dtype=packing.dtype, names=names)
        self._segment = segment
        size = -(-packing.numel // collective.num_ranks)
        part = slice(collective.rank * size, (collective.rank + 1) * size)
        self._parts, self._total = [slot[part] for slot in segment.slots], segment.total[part]
        return segment.slots[collective.rank]

    def sum(self, flat: Tensor) -> None:
        """Replace this rank's slot by the sum of all slots; collective.

        Raises:
            TrainingError: a rank has ended or does not arrive; names it.
        """
        segment = self._segment
        assert segment is not None
        note_exchange(flat, group=self._group)
        segment.barrier(self._timeout_s)  # all slots are written
        torch.add(self._parts[0], self._parts[1], out=self._total)
        for part in self._parts[2:]:
            self._total.add_(part)
        segment.barrier(self._timeout_s)  # all slices are summed; no other rank reads this slot until its next exchange
        # The next exchange overwrites the total only after its first barrier, when all have copied this one. It is
        # copied because clipping and unscaling write into gradients.
        flat.copy_(segment.total)

    def close(self) -> None:
        """Mark this rank as left for the others, and release the memory."""
        super().close()
        if self._segment is not None:
            self._segment.close()
            del self._parts, self._total
            self._segment = None
