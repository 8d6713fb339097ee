"""Observations by the parent of the ranks: their processes and the run time of their threads, their error reports, the
memory events of the cgroup.

The times of threads are those of Linux: nothing is found on a system without `/proc`, or for a process that has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainkit.cluster.host import ProcessId
from trainkit.errors import UnreadableError
from trainkit.files import read_tail
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import ErrorReport, read_error_report
from trainkit.run.process.worker_group import WorkerGroup
from trainkit.run.signals import stacks_signal

_CGROUPS: Final = Path("/sys/fs/cgroup")
_HELD: Final[Mapping[str, str]] = {"T": "stopped by a signal", "t": "held by a debugger"}


class MemoryEvents:
    """Counts the processes of this process's cgroup that the kernel has killed for lack of memory since this object was
    made.

    Args:
        files: files with the kernel's counts, of which the first readable one is used; by default `memory.events` of
            cgroup v2 and `memory.oom_control` of v1.
    """

    def __init__(self, files: Iterable[Path] | None = None) -> None:
        known = _event_files() if files is None else files
        self.file = next((file for file in known if _oom_kills(file) is not None), None)
        """The file that is read; None: this process cannot read any such file."""
        self._before = self._count()

    def _count(self) -> int:
        return 0 if self.file is None else _oom_kills(self.file) or 0

    @property
    def killed(self) -> int:
        """Processes killed for lack of memory since this object was made."""
        return self._count() - self._before


def _oom_kills(file: Path) -> int | None:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None


def _event_files() -> list[Path]:
    """Return the event files of this process's cgroup: below its own name, or at the root of a namespace."""
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mounts, file = [_CGROUPS, _CGROUPS / "unified"], "memory.events"
        elif "memory" in controllers.split(","):
            mounts, file = [_CGROUPS / controllers, _CGROUPS / "memory"], "memory.oom_control"
        else:
            continue
        found += [mount / part / file for mount in mounts for part in (name.lstrip("/"), "")]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrival:
    """The time at which a report was first seen by this process."""

    number: int
    moment: float
    """Time on the clock of this process."""
    written: int
    """The modification time of the file: it distinguishes two reports of one rank, and orders reports found at once."""


class ProcessEvidence:
    """Observes the ranks of one attempt on this host."""

    def __init__(
        self,
        folder: RunFolder,
        marks: Callable[[], Mapping[int, ProcessId]] = dict,
        *,
        away: Mapping[int, str] | None = None,
        memory: MemoryEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._marks, self._clock = folder, marks, clock
        self._away = away or {}
        self._memory = memory or MemoryEvents()
        self._count = 0
        self._arrived: dict[int, _Arrival] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Record the reports that have arrived since the last call, in the order in which they were written."""
        fresh = []
        for rank in ranks:
            try:
                written = self._folder.error_of(rank).stat().st_mtime_ns
            except OSError:
                self._arrived.pop(rank, None)
                continue
            if rank not in self._arrived or self._arrived[rank].written != written:
                fresh.append((written, rank))
        for written, rank in sorted(fresh):
            self._count += 1
            self._arrived[rank] = _Arrival(number=self._count, moment=self._clock(), written=written)

    def arrival(self, rank: int) -> int:
        """Return the position of a rank's report in the order of arrival; after all others if it was not seen."""
        return self._arrived[rank].number if rank in self._arrived else self._count + 1

    def reported_for_s(self, rank: int) -> float | None:
        """Return the seconds since the report of a rank was seen; None: there is none."""
        return self._clock() - self._arrived[rank].moment if rank in self._arrived else None

    def report(self, rank: int) -> ErrorReport | None:
        """Return the report of a rank; None if it has written none."""
        return read_error_report(self._folder.error_of(rank))

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: its number, and pid, host and state of its process if known."""
        report, mark = self.report(rank), self._marks().get(rank)
        if mark is not None:
            state = f", state {mark.state}" if mark.lives and mark.state else ""
            return f"rank {rank} (pid {mark.pid} on {socket.gethostname()}{state})"
        if report is not None and report.pid:
            return f"rank {rank} (pid {report.pid} on {report.host})"
        return f"rank {rank} ({self._away[rank]})" if rank in self._away else f"rank {rank}"

    def pid(self, rank: int) -> int | None:
        """Return the pid of a rank; None if unknown."""
        mark = self._marks().get(rank)
        return None if mark is None else mark.pid

    def state(self, rank: int) -> str:
        """Return the state of a rank's process from /proc; empty if unknown."""
        mark = self._marks().get(rank)
        return "" if mark is None else mark.state

    def held(self, rank: int) -> str | None:
        """Return why a rank's process cannot run (stopped or traced), with its state; None if it can."""
        state = self.state(rank)
        return f"{_HELD[state]} (state {state})" if state in _HELD else None

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, even if its parent has not noticed yet."""
        return self.state(rank) in ("Z", "X", "gone")

    def killed_for_memory(self) -> str | None:
        """Return the kernel's counter that shows a process killed for lack of memory; None if no process was killed."""
        count = self._memory.killed
        return f"oom_kill in {self._memory.file} rose by {count}" if count > 0 else None

    @property
    def counts_memory(self) -> bool:
        """Whether this process can read the kernel's count of such processes."""
        return self._memory.file is not None


_STATE: Final = 0
"""Index of the state among the fields after the name in /proc/PID/stat (field 3)."""


def children_of(pid: int | None) -> tuple[int, ...]:
    """Return the child processes that a process has not waited for; empty if they are unknown."""
    found: list[int] = []
    for task in () if pid is None else _tasks(pid):
        try:
            found += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
    return tuple(found)


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
    found: dict[int, ThreadTimes] = {}
    for pid in pids:
        for task in _tasks(pid):
            try:
                ran, waited_for, _ = (task / "schedstat").read_text().split()
                fields = _fields(task / "stat")
            except (OSError, ValueError):
                continue
            if fields is not None:
                found[int(task.name)] = ThreadTimes(int(ran) / 1e9, int(waited_for) / 1e9, fields[_STATE] == "R")
    return found


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


def _fields(path: Path) -> list[str] | None:
    """Return the fields after the name, which may contain any character."""
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields or None


_ANSWER_S: Final = 0.3
_SIZE: Final = 1 << 16


def stacks_of(group: WorkerGroup, folder: RunFolder, rank: int, pid: int | None) -> str:
    """Return the stacks of a rank's threads and of its data loading processes; empty if it cannot write them.

    The other ranks of the group also write their stacks, into their own files; a rank that is just starting writes them
    later. A stopped process cannot write. The signal kills child processes of the user that do not handle it, shortly
    before they are killed with their rank.
    """
    number = stacks_signal()
    if number is None:
        return ""
    group.signal(number)
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            os.kill(child, number)
    time.sleep(_ANSWER_S)
    try:
        stacks = read_tail(folder.stacks_of(rank), _SIZE)[0].decode(errors="replace").strip()
    except UnreadableError:
        return ""
    return f"Stacks of its threads:\n{stacks}" if stacks else ""
