"""Monitor ranks from their parent: find the one that makes no progress, and observe reports, processes and memory.

A rank hangs if it makes no progress for longer than its limit, which depends on its phase. Only time in which the rank
could have made progress counts: not the time in which this process itself was stopped or had no processor, nor the time
in which a thread of the rank was ready but waited for a processor.

Ranks that train together wait for each other, so that only those with the least progress are judged. An auxiliary task
is judged by itself. A process that is stopped by a signal cannot make progress, whatever its phase: it has the limit of
a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from trainkit.cluster.host import ProcessId, ThreadTimes, children_of, thread_times, waited_s
from trainkit.config.sections import SupervisorConfig
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat
from trainkit.trainer.failpoints import Phase

_POLL_S: Final = 0.5
_ALONE: Final = frozenset({"start", "join", "load", "save", "data", "compile", "end"})
"""Phases in which a rank does not wait for other ranks, or only for ranks in the same phase."""
_READ_BY_CHILDREN: Final = frozenset({"data", "evaluate"})
"""Phases in which a rank may wait for its data loading processes."""
_STOP_S: Final = 5.0
"""Seconds without progress after which a rank that waits for data is ended, if the run was asked to stop."""
_STOP_FACTOR: Final = 3.0
"""The same as a multiple of the longest recent pause, if that is more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverdueRank:
    """A rank that has made no progress for longer than its limit."""

    rank: int
    heartbeat: HeartbeatReading | None
    silence_s: float
    """Seconds without progress, counting only time in which the rank could run."""
    limit: Limit
    stopped: int | None = None
    """The process that is stopped by a signal: that of the rank, or one that reads its samples; None: there is none."""


@dataclass(slots=True)
class _Silence:
    """The time since the last heartbeat of a rank, as long as no other rank was further behind."""

    heartbeat: HeartbeatReading | None = None
    seconds: float = 0.0
    threads: Mapping[int, ThreadTimes] | None = None
    """The scheduler's last reading."""
    unchecked_s: float = 0.0
    """The part of `seconds` since that reading."""


def threads_of(pid: int, phase: Phase) -> Mapping[int, ThreadTimes]:
    """Return the times of the threads that the progress of a process in a phase may depend on."""
    return thread_times((pid, *children_of(pid)) if phase in _READ_BY_CHILDREN else (pid,))


def stopped_process(pid: int, phase: Phase) -> int | None:
    """Return a process that a rank in a phase needs and that is stopped by a signal (state T); None: there is none."""
    needed = (pid, *children_of(pid)) if phase in _READ_BY_CHILDREN else (pid,)
    return next((candidate for candidate in needed if ProcessId.of(candidate).state == "T"), None)


class Monitor:
    """Reads the heartbeats of ranks at intervals.

    Args:
        limits: longest time without progress for each phase.
        folder: holds the heartbeats.
        sees_all: whether all ranks that train together are watched. If some are on other hosts, a rank may wait for one
            of them in most phases, and then has the longest of all limits.
        auxiliary_ranks: ranks that serve the training ranks, and wait for them only in `idle`.
        read: returns the last heartbeat of a rank; by default from the folder.
        pid_of: returns the process of a rank of this host; None if unknown.
        clock: returns monotonic seconds.
        threads: returns the scheduler's statistics for the threads of a process in a phase.
        stopped: returns a stopped process that the process of a rank in a phase needs.
        asked_to_stop: whether the run was asked to stop: a rank that waits for data would never come to it.
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
        stopped: Callable[[int, Phase], int | None] = stopped_process,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._asked_to_stop, self._stop_s = asked_to_stop, 0.0
        self._limits, self._auxiliary_ranks = limits, frozenset(auxiliary_ranks)
        self._read = read or (lambda rank: read_heartbeat(folder.heartbeat_of(rank)))
        self._sees_all = sees_all
        self._pid_of, self._clock, self._threads = pid_of, clock, threads
        self._silences: dict[int, _Silence] = {}
        self._stopped, self._stopped_s = stopped, dict[int, float]()
        self._looked = clock()
        self.interval_s = min(_POLL_S, limits.shortest_s / 4)
        """Seconds between two calls of `look`."""

    def look(self, ranks: Iterable[int]) -> OverdueRank | None:
        """Return a rank that has exceeded its limit, if there is one."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        counted = min(passed, 2 * self.interval_s)  # this process did not run for the rest of the time
        self._stop_s += counted if self._asked_to_stop() else 0.0
        heartbeats = {rank: self._read(rank) for rank in ranks}
        for rank, heartbeat in heartbeats.items():
            if (stopped := self._judge_stopped(rank, heartbeat, counted)) is not None:
                return stopped
        # The auxiliary ranks, and the training ranks with the least progress.
        busy = {rank: beat for rank, beat in heartbeats.items() if beat is None or beat.phase != "idle"}
        progress = {rank: (-1, 0) if beat is None else beat.progress for rank, beat in busy.items()}
        least = min((progress[rank] for rank in busy if rank not in self._auxiliary_ranks), default=None)
        judged = [rank for rank in busy if rank in self._auxiliary_ranks or progress[rank] == least]
        before = self._silences
        self._silences = {}
        for rank in judged:
            silence = before.get(rank)
            if silence is None or silence.heartbeat != heartbeats[rank]:
                self._silences[rank] = _Silence(heartbeats[rank])
            else:
                silence.seconds += counted
                silence.unchecked_s += counted
                self._silences[rank] = silence
        overdue = [due for rank in judged if (due := self._judge(rank)) is not None]
        return min(overdue, key=lambda due: (due.heartbeat.moment if due.heartbeat else 0.0, due.rank), default=None)

    def restart(self) -> None:
        """Restart the clocks of all ranks."""
        self._silences.clear()

    def _judge_stopped(self, rank: int, heartbeat: HeartbeatReading | None, counted: float) -> OverdueRank | None:
        pid, phase = self._pid_of(rank), "start" if heartbeat is None else heartbeat.phase
        stopped = None if pid is None else self._stopped(pid, phase)
        seconds = self._stopped_s[rank] = 0.0 if stopped is None else self._stopped_s.get(rank, 0.0) + counted
        limit = self._limits.of_stopped(heartbeat)
        if seconds <= limit.seconds:
            return None
        return OverdueRank(rank=rank, heartbeat=heartbeat, silence_s=seconds, limit=limit, stopped=stopped)

    def _judge(self, rank: int) -> OverdueRank | None:
        silence = self._silences[rank]
        heartbeat, limit = silence.heartbeat, self._limits.limit_of(silence.heartbeat)
        if limit is None:
            return None
        alone = self._sees_all or rank in self._auxiliary_ranks or heartbeat is None or heartbeat.phase in _ALONE
        if not alone:
            limit = max(limit, self._limits.longest, key=lambda limit: limit.seconds)
        if self._stop_s and heartbeat is not None and heartbeat.phase in _READ_BY_CHILDREN:
            seconds = max(_STOP_S, _STOP_FACTOR * heartbeat.longest_s)
            if min(silence.seconds, self._stop_s) > seconds:
                limit = Limit(key="", seconds=seconds)
        if silence.unchecked_s >= min(2.0, limit.seconds / 4):
            pid, phase = self._pid_of(rank), "start" if heartbeat is None else heartbeat.phase
            threads = {} if pid is None else self._threads(pid, phase)
            if silence.threads is not None:
                silence.seconds -= waited_s(silence.threads, threads, silence.unchecked_s)
            silence.threads, silence.unchecked_s = threads, 0.0
        if silence.seconds <= limit.seconds:
            return None
        return OverdueRank(rank=rank, heartbeat=heartbeat, silence_s=silence.seconds, limit=limit)


FLOOR_S: Final = 30.0
"""The smallest limit that `supervisor.hang_timeout_s=auto` chooses."""
_FACTOR: Final = 10.0
"""The limit that `auto` chooses, as a multiple of the longest recent pause."""
_KEYS: Final[Mapping[Phase, str]] = {
    "start": "start_timeout_s",
    "join": "start_timeout_s",
    "load": "load_timeout_s",
    "callback": "eval_timeout_s",
    "evaluate": "eval_timeout_s",
    "save": "checkpoint_timeout_s",
    "end": "checkpoint_timeout_s",
    "compile": "first_step_timeout_s",
}
"""The key of each phase that is not part of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Longest time without progress in a phase."""

    key: str
    """The full name of the key that sets it; empty: the run was asked to stop, and no key does."""
    seconds: float
    longest_s: float | None = None
    """The longest recent pause from which the limit was derived; None if the limit was given."""

    def remedy(self, silence_s: float) -> str:
        """Return a text with this limit, and with advice in case the rank was healthy and only silent for `silence_s`.

        Example:
            >>> Limit(key="supervisor.eval_timeout_s", seconds=600).remedy(601)
            'The limit is supervisor.eval_timeout_s=600: raise it if the rank was healthy.'
        """
        if not self.key:
            return "It was asked to stop."
        if self.longest_s is None:
            return f"The limit is {self.key}={self.seconds:g}: raise it if the rank was healthy."
        return (
            f"The limit is {self.seconds:.0f} s by {self.key}=auto, where recent steps paused for "
            f"{self.longest_s:.2g} s at most: set {self.key} to more than {silence_s:.0f} if the rank was healthy."
        )


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """The `supervisor.*_timeout_s` keys of a run, each in seconds without progress.

    Example:
        >>> steady = HeartbeatReading(moment=1.0, step=7, phase="forward", longest_s=4.5)
        >>> TimeLimits().limit_of(steady).seconds, TimeLimits(hang_timeout_s=9).limit_of(steady).seconds
        (45.0, 9)
        >>> TimeLimits().limit_of(None).key
        'supervisor.start_timeout_s'
    """

    hang_timeout_s: float | Literal["auto"] = SupervisorConfig.hang_timeout_s
    start_timeout_s: float = SupervisorConfig.start_timeout_s
    first_step_timeout_s: float = SupervisorConfig.first_step_timeout_s
    checkpoint_timeout_s: float = SupervisorConfig.checkpoint_timeout_s
    eval_timeout_s: float = SupervisorConfig.eval_timeout_s
    load_timeout_s: float = SupervisorConfig.load_timeout_s

    @classmethod
    def of(cls, settings: SupervisorConfig | Mapping[str, Any]) -> TimeLimits:
        """Return the limits that a config sets, or those of a mapping that `dataclasses.asdict` made."""
        if isinstance(settings, Mapping):
            return cls(**settings)
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @property
    def shortest_s(self) -> float:
        """The smallest of all limits: heartbeats must be read more often."""
        values = (getattr(self, field.name) for field in fields(self))
        return min(FLOOR_S if value == "auto" else float(value) for value in values)

    @property
    def longest(self) -> Limit:
        """The largest of the given limits."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != "auto"]
        return self._configured(max(names, key=lambda name: float(getattr(self, name))))

    def limit_of(self, heartbeat: HeartbeatReading | None) -> Limit | None:
        """Return the limit for the phase of a rank; None if it may wait for ever."""
        if heartbeat is None:
            return self._configured("start_timeout_s")
        if heartbeat.phase == "idle":
            return None
        if heartbeat.phase in _KEYS:
            return self._configured(_KEYS[heartbeat.phase])
        if heartbeat.is_first:
            return self._configured("first_step_timeout_s")
        return self.of_stopped(heartbeat)

    def of_stopped(self, heartbeat: HeartbeatReading | None) -> Limit:
        """Return the limit of a step, which a process that is stopped by a signal has in every phase."""
        if self.hang_timeout_s != "auto":
            return self._configured("hang_timeout_s")
        longest_s = 0.0 if heartbeat is None else heartbeat.longest_s
        return Limit(key="supervisor.hang_timeout_s", seconds=max(FLOOR_S, _FACTOR * longest_s), longest_s=longest_s)

    def _configured(self, name: str) -> Limit:
        return Limit(key=f"supervisor.{name}", seconds=getattr(self, name))
