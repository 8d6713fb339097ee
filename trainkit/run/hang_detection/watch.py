"""Find the rank that makes no progress for longer than its limit.

Only time counts in which the rank could have made progress: time in which this process did not look does not, since it
was stopped or had no processor itself; nor does time in which a thread of the rank was ready to run and had to wait for
a processor.

Ranks that train together wait for each other, so that of these only the ones that have come least far are judged. A
task that assists them is judged by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection.cpu_times import ThreadTimes, children_of, thread_times, waited_s
from trainkit.run.hang_detection.limits import Limit, TimeLimits
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat
from trainkit.trainer.failpoints import Phase

__all__ = ["OverdueRank", "Watch", "threads_of"]

_LOOK_S: Final = 0.5
_ALONE: Final = frozenset({"start", "join", "load", "save", "data", "compile", "end"})
"""Phases in which a rank waits for no other, or for one in the same phase."""
_READ_BY_CHILDREN: Final = frozenset({"data", "evaluate"})
"""Phases in which a rank may wait for the processes that read its samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverdueRank:
    """A rank that has made no progress for longer than its limit."""

    rank: int
    pulse: HeartbeatReading | None
    silence_s: float
    """For how long, without the time that does not count."""
    limit: Limit


@dataclass(slots=True)
class _Silence:
    """The time since a rank last beat, as long as no other rank was further behind."""

    pulse: HeartbeatReading | None = None
    seconds: float = 0.0
    threads: Mapping[int, ThreadTimes] | None = None
    """What the scheduler said when it was last asked."""
    unasked_s: float = 0.0
    """How much of `seconds` has passed since."""


def threads_of(pid: int, phase: Phase) -> Mapping[int, ThreadTimes]:
    """Return the times of the threads that the progress of a process in a phase may depend on."""
    return thread_times((pid, *children_of(pid)) if phase in _READ_BY_CHILDREN else (pid,))


class Watch:
    """Looks at the pulses of ranks now and then.

    Args:
        limits: how long each may make no progress.
        folder: holds the pulses.
        sees_all: whether all ranks that train together are looked at. Where some are of another host, a rank may wait
            for one of them in most phases, and then has the longest of all limits.
        auxiliary_ranks: ranks that assist those that train, and wait for none of them but in `idle`.
        read: returns the last beat of a rank; by default what the folder holds.
        pid_of: returns the process of a rank of this host; None where it is not known.
        clock: seconds that only rise.
        threads: returns what the scheduler says of the threads of a process in a phase.
    """

    def __init__(
        self,
        limits: TimeLimits,
        folder: RunFolder,
        *,
        sees_all: bool = True,
        auxiliary_ranks: Collection[int] = (),
        read: Callable[[int], HeartbeatReading | None] | None = None,
        pid_of: Callable[[int], int | None] = lambda _rank: None,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int, Phase], Mapping[int, ThreadTimes]] = threads_of,
    ) -> None:
        self._limits, self._auxiliary_ranks = limits, frozenset(auxiliary_ranks)
        self._read = read or (lambda rank: read_heartbeat(folder.heartbeat_of(rank)))
        self._sees_all = sees_all
        self._pid_of, self._clock, self._threads = pid_of, clock, threads
        self._silences: dict[int, _Silence] = {}
        self._looked = clock()
        self.interval_s = min(_LOOK_S, limits.shortest_s / 4)
        """Seconds between two looks."""

    def look(self, ranks: Iterable[int]) -> OverdueRank | None:
        """Return the rank whose time is up, if there is one.

        Args:
            ranks: those that run.
        """
        now = self._clock()
        passed, self._looked = now - self._looked, now
        counted = min(passed, 2 * self.interval_s)  # what is more, this process did not run
        pulses = {rank: self._read(rank) for rank in ranks}
        judged, before = self._judged(pulses), self._silences
        self._silences = {}
        for rank in judged:
            silence = before.get(rank)
            if silence is None or silence.pulse != pulses[rank]:
                self._silences[rank] = _Silence(pulses[rank])
            else:
                silence.seconds += counted
                silence.unasked_s += counted
                self._silences[rank] = silence
        overdue = [found for rank in judged if (found := self._judge(rank)) is not None]
        return min(overdue, key=lambda one: (one.pulse.moment if one.pulse else 0.0, one.rank), default=None)

    def restart(self) -> None:
        """Count the time of every rank from now on."""
        self._silences.clear()

    def _judged(self, pulses: Mapping[int, HeartbeatReading | None]) -> list[int]:
        """Return the auxiliary_ranks, and of the ranks that train those that have come least far."""
        busy = [rank for rank, pulse in pulses.items() if pulse is None or pulse.phase != "idle"]
        progress = {rank: _progress(pulses[rank]) for rank in busy}
        least = min((progress[rank] for rank in busy if rank not in self._auxiliary_ranks), default=None)
        return [rank for rank in busy if rank in self._auxiliary_ranks or progress[rank] == least]

    def _judge(self, rank: int) -> OverdueRank | None:
        silence = self._silences[rank]
        limit = self._limit_of(rank, silence.pulse)
        if limit is None:
            return None
        if silence.unasked_s >= min(2.0, limit.seconds / 4):
            pid, phase = self._pid_of(rank), "start" if silence.pulse is None else silence.pulse.phase
            threads = {} if pid is None else self._threads(pid, phase)
            if silence.threads is not None:
                silence.seconds -= waited_s(silence.threads, threads, silence.unasked_s)
            silence.threads, silence.unasked_s = threads, 0.0
        if silence.seconds <= limit.seconds:
            return None
        return OverdueRank(rank=rank, pulse=silence.pulse, silence_s=silence.seconds, limit=limit)

    def _limit_of(self, rank: int, pulse: HeartbeatReading | None) -> Limit | None:
        limit = self._limits.limit_of(pulse)
        if self._sees_all or rank in self._auxiliary_ranks or limit is None:
            return limit
        alone = pulse is None or pulse.phase in _ALONE
        return limit if alone else max(limit, self._limits.longest, key=lambda one: one.seconds)


def _progress(pulse: HeartbeatReading | None) -> tuple[int, int]:
    return pulse.progress if pulse is not None else (-1, 0)
