"""The host of this process: its cores and GPUs, MIG instances, and the processes of the host.

Identity, children and threads of processes are those of Linux: they are unknown on a system without `/proc`, or for a
process that has ended.

A MIG instance is a part of a GPU that a process sees as a device of its own. CUDA makes only the first instance in
CUDA_VISIBLE_DEVICES visible to a process, so each rank gets its own value of the variable. Source: NVIDIA
Multi-Instance GPU User Guide, section "CUDA device enumeration".
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import resource
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_DEAD: Final = frozenset({"Z", "X", "x", "gone"})
"""States of a process that has exited; a zombie (Z) has not been reaped by its parent yet."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the devices of a process."""
_M_TRIM_THRESHOLD: Final = -1  # constants of malloc.h
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_ON_HEAP: Final = 32 * 2**20
"""Bytes of the largest block that glibc can be told to take from its heap."""
_SHORT_LIVED: Final = 2**20
_TRIM_DEFAULT: Final = 2**17
_TRIM_LATE: Final = 2**30
_MALLOC_VARIABLES: Final = ("MALLOC_", "GLIBC_TUNABLES")


@dataclass(frozen=True, slots=True)
class Machine:
    """The scope in which process ids are unique: a machine since its last boot, or a container on it."""

    host: str
    """The host name."""
    boot_id: str
    """The kernel's random id of this boot; empty if unknown."""
    boot_time: int
    """Seconds since the epoch at which the kernel booted; 0 if unknown."""
    processes: str
    """The PID namespace; empty if unknown."""

    @classmethod
    def here(cls) -> Machine:
        """Return the machine of this process."""
        boot_time = 0
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
            boot_time = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        inode = _namespace("pid")
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id().strip(),
            boot_time=boot_time,
            processes=f"pid:[{inode}]" if inode else "",
        )


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process id together with the start time, which distinguishes it from a later process with the same number."""

    pid: int
    started: int
    """Clock ticks after boot at which the process started; 0 if unknown."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the id of this process, or of a child that was not reaped yet."""
        stat = _stat(Path(f"/proc/{pid}"))
        return cls(pid, stat[1] if stat else 0)

    @property
    def state(self) -> str:
        """The state letter in /proc/PID/stat; `gone` after the process has exited; empty on a system without /proc.

        Example:
            >>> import os
            >>> ProcessId.of(os.getpid()).state
            'R'
        """
        stat = _stat(Path(f"/proc/{self.pid}"))
        if stat is None and not Path("/proc/self/stat").exists():
            return ""
        return stat[0] if stat is not None and stat[1] == self.started else "gone"

    @property
    def lives(self) -> bool:
        """Whether the process has not exited.

        Example:
            >>> import os
            >>> ProcessId.of(os.getpid()).lives
            True
        """
        return self.state not in _DEAD


def host_id() -> int:
    """Return a 63-bit number that two processes share only if they can share memory and the loopback interface.

    Two containers, or two network namespaces, of one machine count as two hosts.
    """
    parts = [socket.gethostname(), _boot_id(), _namespace("pid"), _namespace("net")]
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little") >> 1


def _stat(folder: Path) -> tuple[str, int] | None:
    """Return the state and start time of a process or thread, by its folder in /proc; None if it does not exist."""
    try:
        text = (folder / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return fields[0], int(fields[19])


def _boot_id() -> str:
    """Return the content of the kernel's boot id file; empty if unreadable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    """Return the inode number of a namespace of this process; empty if unknown."""
    try:
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    except OSError:
        return ""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(own_cores())


def own_cores() -> list[int]:
    """Return the cores that this process may use: all, unless its launcher restricts them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def mig_instances(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the MIG instances that CUDA_VISIBLE_DEVICES names; none if it names GPUs or is not set.

    Example:
        >>> mig_instances({"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"})
        ('MIG-4e5f', 'MIG-77aa')
        >>> mig_instances({"CUDA_VISIBLE_DEVICES": "0,1"})
        ()
    """
    names = tuple(name.strip() for name in environ.get(VISIBLE, "").split(","))
    return tuple(dict.fromkeys(names)) if all(name.startswith("MIG-") for name in names) else ()


def count_gpus() -> int:
    """Return the number of CUDA devices of this host for all processes of a run; initialises no device.

    One process counts 1 with MIG.
    """
    import torch  # noqa: PLC0415 - commands that train nothing read this module

    visible = torch.cuda.device_count()
    return max(visible, len(mig_instances(os.environ))) if visible else 0


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread; any other device is left as it is.

    Library kernels and collective buffers without an explicit device would otherwise allocate on cuda:0.
    """
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - as above

        torch.cuda.set_device(device)


MEMORY_SHARE: Final = "TRAINKIT_MEMORY_SHARE"
"""Environment variable of a job that shares its GPUs with other jobs: the share of their memory that it may take."""


def memory_share(environ: Mapping[str, str]) -> float:
    """Return the share of the memory of a GPU that the processes of a job may take together.

    Example:
        >>> memory_share({}), memory_share({"TRAINKIT_MEMORY_SHARE": "0.25"})
        (1.0, 0.25)
    """
    return float(environ.get(MEMORY_SHARE) or 1.0)


def keep_freed_memory() -> bool:
    """Make this process use freed memory again without asking the system for new pages; return whether it will.

    A step on a CPU allocates and frees the same tensors again and again. By default glibc returns free memory at the
    end of its heap to the system, and every page of it is mapped and zeroed again in the next step: a fifth of the
    time of a small convnet. The peak of the memory stays the same, and the process holds it until it ends. Nothing is
    changed if variables of the environment configure malloc.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.

    Example:
        >>> is_kept = keep_freed_memory()  # False with another C library, or if variables configure malloc
    """
    if any(name.startswith(_MALLOC_VARIABLES) for name in os.environ):
        return False
    return _set_malloc({_M_MMAP_THRESHOLD: _LARGEST_ON_HEAP, _M_TRIM_THRESHOLD: _TRIM_LATE})


def return_freed_memory() -> bool:
    """Make this process return large blocks of memory as soon as they are freed; return whether the C library supports
    it.

    Gathered parameters are allocated and freed repeatedly. Once glibc has freed a block, it keeps blocks of that size
    (up to 32 MiB) on its heap, and the heap fragments: the memory of a rank grows far beyond its need. A fixed
    threshold costs new pages for every block above it.

    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    return _set_malloc({_M_MMAP_THRESHOLD: _SHORT_LIVED, _M_TRIM_THRESHOLD: _TRIM_DEFAULT})


def _set_malloc(options: Mapping[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    if mallopt is None:
        return False
    accepted = [mallopt(option, value) == 1 for option, value in options.items()]
    return all(accepted)


def rank_environ(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assign one of several MIG instances to a rank; empty without MIG.

    Example:
        >>> rank_environ("cuda:1", {"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"})
        {'CUDA_VISIBLE_DEVICES': 'MIG-77aa', 'TRAINKIT_DEVICE': 'cuda:0'}
        >>> rank_environ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0,1"})
        {}
    """
    names, (kind, _, index) = mig_instances(environ), device.partition(":")
    number = int(index or 0)
    if kind != "cuda" or len(names) < 2 or number >= len(names):
        return {}
    return {VISIBLE: names[number], "TRAINKIT_DEVICE": "cuda:0"}


def threads_of(process: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of threads of a process that shares its cores with other processes of its launch.

    SLURM and mpirun may bind each process to its own cores; torchrun gives all cores to all processes.

    Example:
        >>> bound = [{"host": "a", "cores": [0, 1]}, {"host": "a", "cores": [2, 3]}, {"host": "b", "cores": [0, 1]}]
        >>> free = [{"host": "a", "cores": [0, 1, 2, 3]}, {"host": "a", "cores": [0, 1, 2, 3]}]
        >>> threads_of(bound[0], bound), threads_of(free[0], free)
        (2, 2)
    """
    cores = set(process["cores"])
    sharing = [item for item in processes if item["host"] == process["host"] and cores & {*item["cores"]}]
    return max(1, len(cores) // len(sharing))


def peak_resident_bytes() -> int:
    """Return the most memory in bytes that this process has held so far.

    Source: VmHWM of proc(5) on Linux, where ru_maxrss begins with the peak of the program that started this one; else
    getrusage(2), ru_maxrss: KiB, but bytes on macOS.

    Example:
        >>> peak_resident_bytes() > 0
        True
    """
    with contextlib.suppress(OSError):
        if match := re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes()):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def children_of(pid: int | None) -> tuple[int, ...]:
    """Return the child processes that a process has not waited for; empty if they are unknown."""
    pids: list[int] = []
    for task in () if pid is None else _tasks(pid):
        try:
            pids += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
    return tuple(pids)


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """The scheduler's statistics of a thread."""

    ran_s: float
    """Seconds that the thread has run on a processor."""
    waited_s: float
    """Seconds that the thread, ready to run, waited for a processor before it last ran."""
    ready: bool
    """Whether the thread is running or ready to run."""


def thread_times(pids: Iterable[int]) -> dict[int, ThreadTimes]:
    """Return the times of every thread of some processes, by thread id."""
    times: dict[int, ThreadTimes] = {}
    for pid in pids:
        for task in _tasks(pid):
            try:
                ran, waited_for, _ = (task / "schedstat").read_text().split()
            except (OSError, ValueError):
                continue
            if (stat := _stat(task)) is not None:
                times[int(task.name)] = ThreadTimes(int(ran) / 1e9, int(waited_for) / 1e9, stat[0] == "R")
    return times


def waited_s(before: Mapping[int, ThreadTimes], after: Mapping[int, ThreadTimes], seconds: float) -> float:
    """Return the longest time that a thread waited for a processor between two readings.

    The scheduler records a wait when it ends. A thread that is ready in both readings and has not run is still waiting.

    Example:
        >>> starved = ThreadTimes(ran_s=1.0, waited_s=0.0, ready=True)
        >>> waited_s({7: starved}, {7: starved}, 4.0)
        4.0
        >>> sleeping = ThreadTimes(ran_s=1.0, waited_s=0.0, ready=False)
        >>> waited_s({7: sleeping}, {7: sleeping}, 4.0)
        0.0
    """
    longest = 0.0
    for thread in before.keys() & after.keys():
        first, last = before[thread], after[thread]
        booked = last.waited_s - first.waited_s
        pending = seconds if first.ready and last.ready and first.ran_s == last.ran_s else 0.0
        longest = max(longest, booked, pending)
    return min(longest, seconds)


def _tasks(pid: int) -> Iterator[Path]:
    root = f"/proc/{pid}/task"
    try:
        names = os.listdir(root)  # noqa: PTH208 - iterdir() raises midway if the process ends
    except OSError:
        return
    yield from (Path(root, name) for name in names)
