"""What an agent observes of its ranks beside heartbeats: error reports, processes, and kills for lack of memory."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainkit.cluster.host import ProcessId
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import ErrorReport, read_error_report

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
        folder: RunFolder | None,
        marks: Callable[[], Mapping[int, ProcessId]] = dict,
        *,
        away: Mapping[int, str] | None = None,
        known: Mapping[int, ErrorReport] | None = None,
        memory: MemoryEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._marks, self._clock = folder, marks, clock
        self._away, self._known = away or {}, known or {}
        self._memory = memory or MemoryEvents()
        self._count = 0
        self._arrived: dict[int, _Arrival] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Record the reports that have arrived since the last call, in the order in which they were written."""
        fresh: list[tuple[int, int]] = []
        if self._folder is None:
            return
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
        read = None if self._folder is None else read_error_report(self._folder.error_of(rank))
        return read or self._known.get(rank)

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
