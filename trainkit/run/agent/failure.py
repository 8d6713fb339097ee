"""Find the rank that failed first, and how it failed: the first line that the user reads.

Failures are ordered by kind: an error that a rank raised itself, then a process that was ended by a signal or an exit,
then a lost connection. Within a kind the lower step comes first, then the earlier arrival at this process. Clocks of
other hosts are not compared.

The evidence beside heartbeats are error reports, the states of processes, and kills for lack of memory.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal, NamedTuple

from trainkit.cluster.host import ProcessId
from trainkit.errors import HangError, TrainingError, TrainkitError, UnreadableError
from trainkit.files import read_tail
from trainkit.run.agent.monitor import OverdueRank
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import ErrorReport, read_error_report
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat
from trainkit.run.process.nccl_dumps import dumps_note, gave_up_waiting
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.signals import EXIT_CODES
from trainkit.strategies.flight_recorder import waited_for

_CGROUPS: Final = Path("/sys/fs/cgroup")
_SUSPENDED: Final[Mapping[str, str]] = {"T": "stopped by a signal", "t": "held by a debugger"}


class MemoryEvents:
    """Counts the processes of this process's cgroup that the kernel has killed for lack of memory since this object was
    made.

    Args:
        files: files with the kernel's counts, of which the first readable one is used; by default `memory.events` of
            cgroup v2 and `memory.oom_control` of v1.
    """

    def __init__(self, files: Iterable[Path] | None = None) -> None:
        candidates = _event_files() if files is None else files
        self.file = next((file for file in candidates if _oom_kills(file) is not None), None)
        """The file that is read; None: this process cannot read any such file."""
        self._before = self._count

    @property
    def _count(self) -> int:
        return 0 if self.file is None else _oom_kills(self.file) or 0

    @property
    def killed(self) -> int:
        """Processes killed for lack of memory since this object was made."""
        return self._count - self._before


def _oom_kills(file: Path) -> int | None:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None


def _event_files() -> list[Path]:
    """Return the event files of this process's cgroup: below its own name, or at the root of a namespace."""
    files: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mounts, file = [_CGROUPS, _CGROUPS / "unified"], "memory.events"
        elif "memory" in controllers.split(","):
            mounts, file = [_CGROUPS / controllers, _CGROUPS / "memory"], "memory.oom_control"
        else:
            continue
        files += [mount / part / file for mount in mounts for part in (name.lstrip("/"), "")]
    return files


class _Arrival(NamedTuple):
    """The time at which a report was first seen by this process."""

    number: int
    moment: float
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
        reports: Mapping[int, ErrorReport] | None = None,
        memory: MemoryEvents | None = None,
    ) -> None:
        self.folder, self._marks = folder, marks
        self._away, self._reports = away or {}, reports or {}
        self._memory = memory or MemoryEvents()
        self._count = 0
        self._arrived: dict[int, _Arrival] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Record the reports that have arrived since the last call, in the order in which they were written."""
        fresh: list[tuple[int, int]] = []
        if self.folder is None:
            return
        for rank in ranks:
            try:
                written = self.folder.error_of(rank).stat().st_mtime_ns
            except OSError:
                self._arrived.pop(rank, None)
                continue
            if rank not in self._arrived or self._arrived[rank].written != written:
                fresh.append((written, rank))
        for written, rank in sorted(fresh):
            self._count += 1
            self._arrived[rank] = _Arrival(number=self._count, moment=time.monotonic(), written=written)

    def arrival(self, rank: int) -> int:
        """Return the position of a rank's report in the order of arrival; after all others if it was not seen."""
        return self._arrived[rank].number if rank in self._arrived else self._count + 1

    def reported_for_s(self, rank: int) -> float | None:
        """Return the seconds since the report of a rank was seen; None: there is none."""
        return time.monotonic() - self._arrived[rank].moment if rank in self._arrived else None

    def report(self, rank: int) -> ErrorReport | None:
        """Return the report of a rank; None if it has written none."""
        read = None if self.folder is None else read_error_report(self.folder.error_of(rank))
        return read or self._reports.get(rank)

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

    def suspended(self, rank: int) -> str | None:
        """Return why a rank's process cannot run (stopped or traced), with its state; None if it can."""
        state = self.state(rank)
        return f"{_SUSPENDED[state]} (state {state})" if state in _SUSPENDED else None

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, even if its parent has not noticed yet."""
        return self.state(rank) in ("Z", "X", "gone")

    def out_of_memory(self) -> str:
        """Return a sentence if the kernel has killed a process for lack of memory, or if that cannot be known."""
        if self._memory.file is None:
            return " The system may have run out of memory."
        count = self._memory.killed
        return f" Its cgroup ran out of memory: oom_kill in {self._memory.file} rose by {count}." if count > 0 else ""


_LOG_LINES: Final = 20
_LOG_BYTES: Final = 1 << 16
_CLEAN: Final = frozenset(EXIT_CODES.values())


class Kind(IntEnum):
    """The kinds of failures, ordered so that earlier ones explain later ones."""

    OWN_ERROR = 0
    PROCESS_ENDED = 1
    CONNECTION_LOST = 2


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """All that is known of a rank when a failure is judged."""

    rank: int
    exit_code: int | None = None
    """Exit code of a process that ended before its task was done; None: it runs, or it is not ours."""
    report: ErrorReport | None = None
    arrival: int = 0
    """Position of the exit or the report in the order in which they reached this process."""
    heartbeat: HeartbeatReading | None = None
    gave_up_waiting: bool = False
    """Whether NCCL ended it because one of its exchanges had failed."""
    is_suspended: bool = False
    """Whether its process is stopped by a signal, or held by a debugger."""
    has_ended: bool = False
    """Whether its process has ended, even if its exit has not arrived."""
    is_late: bool = False
    """Whether others have entered a collective that it has not."""
    overdue: OverdueRank | None = None

    @property
    def kind(self) -> Kind | None:
        """The kind of its failure; None: it has not failed."""
        if self.report is not None:
            return Kind.CONNECTION_LOST if self.report.is_secondary else Kind.OWN_ERROR
        if self.exit_code is None:
            return None
        return Kind.CONNECTION_LOST if self.gave_up_waiting else Kind.PROCESS_ENDED

    @property
    def step(self) -> int:
        """Updates that it had completed; -1: it had not begun, or none is known."""
        source = self.report or self.heartbeat
        return -1 if source is None or source.step is None else source.step

    @property
    def progress(self) -> tuple[int, int]:
        """Step and phase of its last heartbeat."""
        return (-1, 0) if self.heartbeat is None else self.heartbeat.progress


@dataclass(frozen=True, kw_only=True)
class Graces:
    """Seconds from the first failure in which the failure that caused it may still arrive."""

    error: float
    """After an error that a rank raised itself, or a process that ended without a report."""
    lost: float
    """While all failed ranks only lost a connection: the rank that failed first may be the last to report."""
    exit: float
    """For the exit of a process that has ended, which may arrive late on a busy machine."""


AT_THE_AGENT: Final = Graces(error=0.1, lost=1.0, exit=10.0)
"""Of an agent, which receives the exits of its ranks."""
AT_THE_STORE: Final = Graces(error=0.2, lost=3.0, exit=0.0)
"""Of processes that report to each other through a store."""


def first_failure(
    facts: Collection[RankFacts], *, waited_s: float = math.inf, graces: Graces = AT_THE_AGENT
) -> tuple[RankFacts, Literal["failed", "hangs", "unresponsive"]] | float | None:
    """Return the rank that failed first, or seconds to wait for further facts, or None: no rank has failed.

    A rank whose process is suspended or has ended is blamed for a hang before the rank with the least progress. If
    every failed rank only lost a connection, the rank that they waited for is unresponsive.

    Args:
        facts: of every rank that takes part, except those that have finished their task.
        waited_s: seconds since the first failure arrived.
        graces: how long to wait.

    Example:
        >>> killed, waits = RankFacts(rank=1, exit_code=-9), RankFacts(rank=0)
        >>> first_failure([killed, waits], waited_s=0.0), first_failure([killed, waits])[0].rank, first_failure([waits])
        (0.1, 1, None)
    """
    failed = [(peer.kind, peer.step, peer.arrival, peer) for peer in facts if peer.kind is not None]
    silent = [peer for peer in facts if peer.kind is None]
    if not failed:
        overdue = next((peer for peer in silent if peer.overdue is not None), None)
        return None if overdue is None else (_blamed(overdue, silent), "hangs")
    first_kind = min(kind for kind, *_ in failed)
    grace_s = graces.error
    if first_kind is Kind.CONNECTION_LOST:
        ended = [peer.has_ended for peer in silent]
        grace_s = max(graces.error if all(ended) else graces.lost, graces.exit if any(ended) else 0.0)
    if silent and waited_s < grace_s:
        return grace_s - waited_s
    if first_kind is Kind.CONNECTION_LOST and silent:
        return min(silent, key=_unresponsive), "unresponsive"
    return min(failed, key=lambda entry: entry[:3])[3], "failed"


def _blamed(overdue: RankFacts, facts: Collection[RankFacts]) -> RankFacts:
    blocked = [peer for peer in facts if peer.is_suspended or peer.has_ended]
    suspects = blocked or [peer for peer in facts if peer.is_late and peer.progress == overdue.progress]
    return overdue if overdue in suspects or not suspects else suspects[0]


def _unresponsive(peer: RankFacts) -> tuple[bool, tuple[int, int], bool, float]:
    moment = 0.0 if peer.heartbeat is None else peer.heartbeat.moment
    return not (peer.is_suspended or peer.has_ended), peer.progress, not peer.is_late, moment


def facts_of(
    evidence: ProcessEvidence,
    *,
    exits: Sequence[ProcessExit] = (),
    running: Iterable[int] = (),
    reports: Mapping[int, ErrorReport] | None = None,
    overdue: OverdueRank | None = None,
) -> list[RankFacts]:
    """Return the facts about the ranks that have ended and the ranks that run.

    Args:
        evidence: what was observed of the processes; without a folder they have no heartbeats, reports and collectives.
        exits: of processes that ended before their task was done, in the order of their arrival.
        running: ranks whose exit has not arrived.
        reports: the reports that count, in the order of their arrival; None: those in the folder.
        overdue: the rank that exceeded its limit: then no report counts.
    """
    running, folder = list(running), evidence.folder
    if overdue is not None:
        reports = {}
    ranks = [*(ended.rank for ended in exits), *(reports or ()), *running]
    evidence.look(ranks)
    late = waited_for(running, folder.collectives_of) if folder is not None else frozenset[int]()
    arrivals = {ended.rank: i for i, ended in enumerate(exits)} | {rank: i for i, rank in enumerate(reports or ())}
    codes = {ended.rank: ended.code for ended in exits}
    facts = []
    for rank in dict.fromkeys(ranks):
        report = evidence.report(rank) if reports is None else reports.get(rank)
        code = codes.get(rank)
        is_seen = report is not None and reports is None
        excess = overdue if overdue is not None and overdue.rank == rank else None
        if excess is not None:
            heartbeat = excess.heartbeat
        else:
            heartbeat = None if folder is None else read_heartbeat(folder.heartbeat_of(rank))
        facts.append(
            RankFacts(
                rank=rank,
                exit_code=code,
                report=report,
                arrival=evidence.arrival(rank) if is_seen else arrivals.get(rank, 0),
                heartbeat=heartbeat,
                gave_up_waiting=folder is not None and code is not None and gave_up_waiting(folder, rank, code),
                is_suspended=evidence.suspended(rank) is not None,
                has_ended=evidence.has_ended(rank),
                is_late=rank in late,
                overdue=excess,
            )
        )
    return facts


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that caused the other failures of an attempt."""

    rank: int
    headline: str
    """One sentence: rank, process and host; when; what happened."""
    detail: str = ""
    """Traceback, stacks, or the end of a log."""
    report: ErrorReport | None = None
    hang: bool = False
    step: int | None = None
    """Updates that the rank had completed; None: it had not begun."""
    dumps: str = ""
    """Note about the files of NCCL's flight recorder with the last collectives of the ranks; empty without files."""

    @property
    def is_permanent(self) -> bool:
        """Whether a restart would fail in the same way."""
        return self.report is not None and self.report.is_permanent

    def error(self, remark: str = "") -> TrainkitError:
        """Return the exception that ends the command."""
        if self.report is not None and self.report.is_permanent:
            return self.report.error()
        headline = f"{self.headline} {remark}".rstrip()
        kind = HangError if self.hang else TrainingError
        return kind("\n".join(part for part in (headline, self.detail, self.dumps) if part))


def is_clean(folder: RunFolder, exited: ProcessExit, *, stopping: bool) -> bool:
    """Return whether a rank that has ended had finished its task, or was asked to stop before that.

    Exit code 0 alone shows neither: user code may call `sys.exit` or `os._exit` in the middle of a step.
    """
    if exited.code not in _CLEAN:
        return False
    return folder.done_of(exited.rank).exists() or (exited.code != 0 and stopping)


def failure_of(evidence: ProcessEvidence, facts: Collection[RankFacts]) -> Failure:
    """Return the first failure of ranks of which one has failed or is overdue, with the text that names it."""
    result, folder = first_failure(facts), evidence.folder
    assert isinstance(result, tuple)
    assert folder is not None
    first, verdict = result
    if verdict == "failed" and (report := first.report) is not None:
        when = " while starting" if report.step is None else f" in step {report.step} ({report.phase})"
        message = next(iter(report.message.splitlines()), "").rstrip(".")  # the whole message ends the traceback
        text = f" failed{when}: {': '.join(filter(None, (report.kinds[0], message)))}."
        if report.left_by is not None:
            text = f" exited with code {report.left_by}{when} before the training was done."
        return _failure(folder, first, evidence.name(first.rank) + text, report.traceback)
    name, heartbeat = evidence.name(first.rank), first.heartbeat
    when = f" in {heartbeat.position}" if heartbeat else " while starting"
    if verdict == "failed":
        assert first.exit_code is not None
        headline = name + _of_exit(first.exit_code, when, evidence)
        return _failure(folder, first, headline, _tail(folder.log_of(first.rank)))
    reason = evidence.suspended(first.rank)
    remedy = "" if evidence.state(first.rank) != "T" else f" To let it continue: kill -CONT {evidence.pid(first.rank)}."
    if verdict == "unresponsive":
        state = f" stopped answering{when}."
        if reason is not None:
            state = f" is {reason}{when}.{remedy}"
        elif first.has_ended:
            state = f" has ended{when} without an error report."
        return _failure(folder, first, name + state, hang=not first.has_ended)
    overdue = next(peer.overdue for peer in facts if peer.overdue is not None)
    state = "." if reason is None else f": it is {reason}.{remedy}"
    if reason is None and overdue.stopped is not None:
        reader = f"pid {overdue.stopped}, which reads its samples, is stopped by a signal (state T)"
        state = f": {reader}. To let it continue: kill -CONT {overdue.stopped}."
    silence_s = overdue.silence_s
    headline = f"{name} has made no progress for {silence_s:.0f} s{when}{state} {overdue.limit.remedy(silence_s)}"
    return _failure(folder, first, headline, hang=True)


def _failure(folder: RunFolder, first: RankFacts, headline: str, detail: str = "", *, hang: bool = False) -> Failure:
    step = None if first.step < 0 else first.step
    report = None if hang else first.report
    return Failure(
        rank=first.rank, headline=headline, detail=detail, report=report, hang=hang, step=step, dumps=dumps_note(folder)
    )


def _of_exit(code: int, when: str, evidence: ProcessEvidence) -> str:
    if code == 0:
        return f" exited with code 0{when} before the training was done."
    if code > 0:
        return f" exited with code {code}{when} without an error report."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f" was ended by {name}{when}.{evidence.out_of_memory() if name == 'SIGKILL' else ''}"


def _tail(log: Path) -> str:
    try:
        lines = read_tail(log, _LOG_BYTES)[0].decode(errors="replace").splitlines()[-_LOG_LINES:]
    except UnreadableError:
        return ""
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)]) if lines else ""
