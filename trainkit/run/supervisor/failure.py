"""Find the rank that failed first, and how it failed: the first line that the user reads.

Failures are ordered by kind: an error that a rank raised itself, then a process that was ended by a signal or an exit,
then a lost connection. Within a kind the lower step comes first, then the earlier arrival at this process. Clocks of
other hosts are not compared.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Final

from trainkit.errors import HangError, TrainingError, TrainkitError, UnreadableError
from trainkit.files import read_tail
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import OverdueRank, ProcessEvidence
from trainkit.run.process.error_report import ErrorReport
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat
from trainkit.run.process.nccl_dumps import dumps_note, gave_up_waiting
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.signals import EXIT_CODES
from trainkit.strategies.flight_recorder import waited_for

_LOG_LINES: Final = 20
_LOG_BYTES: Final = 1 << 16
_CLEAN: Final = frozenset(EXIT_CODES.values())


class Kind(IntEnum):
    """The kinds of failures, ordered so that earlier ones explain later ones."""

    OWN_ERROR = 0
    PROCESS_ENDED = 1
    CONNECTION_LOST = 2


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Account:
    """Facts about one failed rank."""

    rank: int
    kind: Kind
    step: int
    arrival: int
    report: ErrorReport | None
    code: int

    @property
    def order(self) -> tuple[Kind, int, int]:
        return self.kind, self.step, self.arrival


def is_clean(folder: RunFolder, exited: ProcessExit, *, stopping: bool) -> bool:
    """Return whether a rank that has ended had finished its task, or was asked to stop before that.

    Exit code 0 alone shows neither: user code may call `sys.exit` or `os._exit` in the middle of a step.
    """
    if exited.code not in _CLEAN:
        return False
    return folder.done_of(exited.rank).exists() or (exited.code != 0 and stopping)


def root_cause(
    folder: RunFolder, exits: Sequence[ProcessExit], running: Iterable[int], evidence: ProcessEvidence | None = None
) -> Failure:
    """Return the failure that caused the others.

    If every failed rank only lost a connection, and a rank without an error report still runs, that rank is
    unresponsive.
    """
    running, evidence = list(running), evidence or ProcessEvidence(folder)
    evidence.look([*(exited.rank for exited in exits), *running])
    reports = {rank: report for rank in running if (report := evidence.report(rank)) is not None}
    accounts = [_account(folder, exited, place, evidence) for place, exited in enumerate(exits)]
    accounts += [_reported(report, evidence) for report in reports.values()]
    first = min(accounts, key=lambda account: account.order)
    unreported = [rank for rank in running if rank not in reports]
    if first.kind is Kind.CONNECTION_LOST and unreported:
        return unresponsive_rank(folder, unreported, evidence)
    if first.report is not None:
        return replace(_from_report(first.report, evidence), dumps=dumps_note(folder))
    return replace(_from_exit(folder, first, evidence), dumps=dumps_note(folder))


def _account(folder: RunFolder, exited: ProcessExit, place: int, evidence: ProcessEvidence) -> _Account:
    report = evidence.report(exited.rank)
    if report is not None:
        return _reported(report, evidence)
    heartbeat = read_heartbeat(folder.heartbeat_of(exited.rank))
    step = -1 if heartbeat is None else heartbeat.step
    lost = gave_up_waiting(folder, exited.rank, exited.code)
    kind = Kind.CONNECTION_LOST if lost else Kind.PROCESS_ENDED
    return _Account(rank=exited.rank, kind=kind, step=step, arrival=place, report=None, code=exited.code)


def _reported(report: ErrorReport, evidence: ProcessEvidence) -> _Account:
    step = -1 if report.step is None else report.step
    kind = Kind.CONNECTION_LOST if report.is_secondary else Kind.OWN_ERROR
    arrival = evidence.arrival(report.rank)
    return _Account(rank=report.rank, kind=kind, step=step, arrival=arrival, report=report, code=report.exit_code)


def unresponsive_rank(folder: RunFolder, ranks: Iterable[int], evidence: ProcessEvidence | None = None) -> Failure:
    """Return the failure of the rank that the others waited for, out of the ranks without an error report."""
    evidence = evidence or ProcessEvidence(folder)
    rank, heartbeat = _waited_for(folder, ranks, evidence)
    held, ended = evidence.held(rank), evidence.has_ended(rank)
    headline = f"{evidence.name(rank)} stopped answering{_when(heartbeat)}."
    if held is not None:
        headline = f"{evidence.name(rank)} is {held}{_when(heartbeat)}.{_remedy(rank, evidence)}"
    elif ended:
        headline = f"{evidence.name(rank)} has ended{_when(heartbeat)} without an error report."
    step = None if heartbeat is None else heartbeat.step
    return Failure(rank=rank, headline=headline, hang=not ended, step=step, dumps=dumps_note(folder))


def _from_report(report: ErrorReport, evidence: ProcessEvidence) -> Failure:
    name = evidence.name(report.rank)
    when = " while starting" if report.step is None else f" in step {report.step} ({report.phase})"
    if report.left_by is not None:
        headline = f"{name} exited with code {report.left_by}{when} before the training was done."
    else:
        what = next(iter(report.message.splitlines()), "").rstrip(".")  # the whole message ends the traceback
        headline = f"{name} failed{when}: {': '.join(filter(None, (report.kinds[0], what)))}."
    return Failure(rank=report.rank, headline=headline, detail=report.traceback, report=report, step=report.step)


def _from_exit(folder: RunFolder, account: _Account, evidence: ProcessEvidence) -> Failure:
    rank, heartbeat = account.rank, read_heartbeat(folder.heartbeat_of(account.rank))
    name, when = evidence.name(rank), _when(heartbeat)
    if account.code == 0:
        headline = f"{name} exited with code 0{when} before the training was done."
    elif account.code > 0:
        headline = f"{name} exited with code {account.code}{when} without an error report."
    else:
        number = _signal_name(-account.code)
        hint = _memory_hint(evidence) if number == "SIGKILL" else ""
        headline = f"{name} was ended by {number}{when}.{hint}"
    step = None if heartbeat is None else heartbeat.step
    return Failure(rank=rank, headline=headline, detail=_tail(folder.log_of(rank)), step=step)


def _memory_hint(evidence: ProcessEvidence) -> str:
    counted = evidence.killed_for_memory()
    if counted is not None:
        return f" Its cgroup ran out of memory: {counted}."
    return "" if evidence.counts_memory else " The system may have run out of memory."


def hanging(
    folder: RunFolder, overdue: OverdueRank, running: Iterable[int], evidence: ProcessEvidence | None = None
) -> Failure:
    """Return the failure of a rank that has made no progress for longer than its limit.

    A rank whose process is stopped or has ended is named before the rank with the least progress. Among ranks with
    equal progress, a rank is named that has not entered a collective which others have entered.
    """
    evidence = evidence or ProcessEvidence(folder)
    running = list(running)
    blocked = [rank for rank in running if evidence.held(rank) is not None or evidence.has_ended(rank)]
    waited = waited_for(running, folder.collectives_of)
    late = [rank for rank in running if rank in waited and _is_level(folder, rank, overdue.heartbeat)]
    suspects = blocked or late
    rank = overdue.rank if overdue.rank in suspects or not suspects else suspects[0]
    heartbeat = overdue.heartbeat if rank == overdue.rank else read_heartbeat(folder.heartbeat_of(rank))
    held = evidence.held(rank)
    state = "." if held is None else f": it is {held}.{_remedy(rank, evidence)}"
    if held is None and overdue.stopped is not None:
        reader = f"pid {overdue.stopped}, which reads its samples, is stopped by a signal (state T)"
        state = f": {reader}. To let it continue: kill -CONT {overdue.stopped}."
    headline = (
        f"{evidence.name(rank)} has made no progress for {overdue.silence_s:.0f} s{_when(heartbeat)}{state} "
        f"{overdue.limit.remedy(overdue.silence_s)}"
    )
    step = None if heartbeat is None else heartbeat.step
    return Failure(rank=rank, headline=headline, hang=True, step=step, dumps=dumps_note(folder))


def _is_level(folder: RunFolder, rank: int, heartbeat: HeartbeatReading | None) -> bool:
    """Return whether the last heartbeat of a rank shows exactly the progress of `heartbeat`."""
    found = read_heartbeat(folder.heartbeat_of(rank))
    return found is not None and heartbeat is not None and found.progress == heartbeat.progress


def _remedy(rank: int, evidence: ProcessEvidence) -> str:
    pid = evidence.pid(rank)
    return "" if pid is None or evidence.state(rank) != "T" else f" To let it continue: kill -CONT {pid}."


def _waited_for(
    folder: RunFolder, ranks: Iterable[int], evidence: ProcessEvidence
) -> tuple[int, HeartbeatReading | None]:
    """Return the rank that the others wait for.

    It is a rank whose process is stopped or has ended, else one with the least progress; among those, one that has not
    entered a collective which others have entered, else the one with the oldest heartbeat.
    """
    ranks = list(ranks)
    late = waited_for(ranks, folder.collectives_of)
    heartbeats: Mapping[int, HeartbeatReading | None] = {
        rank: read_heartbeat(folder.heartbeat_of(rank)) for rank in ranks
    }

    def place(rank: int) -> tuple[bool, tuple[int, int], bool, float]:
        heartbeat = heartbeats[rank]
        blocked = evidence.held(rank) is not None or evidence.has_ended(rank)
        progress, moment = (heartbeat.progress, heartbeat.moment) if heartbeat else ((-1, 0), 0.0)
        return not blocked, progress, rank not in late, moment

    rank = min(heartbeats, key=place)
    return rank, heartbeats[rank]


def _when(heartbeat: HeartbeatReading | None) -> str:
    return f" in {heartbeat.place}" if heartbeat else " while starting"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    try:
        lines = read_tail(log, _LOG_BYTES)[0].decode(errors="replace").splitlines()[-_LOG_LINES:]
    except UnreadableError:
        return ""
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)]) if lines else ""
