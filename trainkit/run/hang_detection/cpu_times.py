"""Read from Linux how long each thread of a process ran, and how long it waited for a processor.

Nothing is found on a system without `/proc`, or for a process that has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ThreadTimes", "children_of", "thread_times", "waited_s"]

_STATE: Final = 0
"""Index of the state among the fields after the name in /proc/PID/stat (field 3)."""


def children_of(pid: int | None) -> tuple[int, ...]:
    """Return the child processes that a process has not waited for; none if they are unknown."""
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
    """Seconds that it has run on a processor."""
    waited_s: float
    """Seconds that it was ready to run, and waited for a processor, before it last ran."""
    ready: bool
    """Whether it runs, or is ready to run."""


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

    Args:
        before: the first reading.
        after: the second.
        seconds: the time between them.

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
