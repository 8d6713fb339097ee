"""Decide which failures are worth another attempt at the run, and which end it.

A run is given up
    when user code raises an exception that it raised before: same rank, same step, same text
    after `max_restarts` restarts in a row without a newer checkpoint
    after `max_restarts` restarts because of failures in one step, whatever was saved between them
    after `max_restarts` restarts in a row whose attempts raised an exception within their first two steps

The last rule ends a run that advances by one step with each restart. A lost replica (docs/elastic.md) counts in none of
the rules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from trainkit.cluster.tasks import Task
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import ErrorReport, read_error_report
from trainkit.run.process.heartbeat import read_heartbeat

__all__ = ["Fault", "RaisedError", "RestartPolicy", "fault_of", "raised_by", "repeated"]

_OURS: Final = frozenset({"TrainkitError", "RankError"})
"""Classes of trainkit's own errors, and the one that reports a dead process to a process backend."""
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class RaisedError:
    """An exception of user code; two that are equal were raised in the same place."""

    task: str
    """The task that raised it: ranks may be renumbered, tasks are not."""
    rank: int = field(compare=False)
    step: int | None
    text: str
    """Class and message, without addresses of objects."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The failure of one attempt."""

    step: int | None
    """Updates that the failing rank had completed; None: it had not begun."""
    begun_at: int
    """The step at which the attempt began."""
    reached: int
    """The step of the newest checkpoint."""
    newer: bool
    """Whether the attempt wrote that checkpoint."""
    raised: frozenset[RaisedError] = frozenset()
    """What each rank raised, if user code raised the exception that ended the attempt; otherwise empty."""


def fault_of(folder: RunFolder, tasks: Iterable[Task], rank: int, *, begun_at: int | None, reached: int) -> Fault:
    """Return the facts about a failed attempt that the restart policy needs.

    Args:
        folder: holds the error reports and heartbeats of the attempt.
        tasks: the tasks of the attempt.
        rank: the rank that caused the failure.
        begun_at: the step of the checkpoint that the attempt began at; None: it began at the start.
        reached: the step of the newest checkpoint.
    """
    found = frozenset(raised for task in tasks if (raised := raised_by(folder, task)) is not None)
    heartbeat = read_heartbeat(folder.heartbeat_of(rank))
    return Fault(
        step=None if heartbeat is None else heartbeat.step,
        begun_at=begun_at or 0,
        reached=reached,
        newer=reached != begun_at,
        raised=found if any(raised.rank == rank for raised in found) else frozenset(),
    )


def raised_by(folder: RunFolder, task: Task) -> RaisedError | None:
    """Return the exception of user code that a task reported; None: it reported none, or one of another kind."""
    report = read_error_report(folder.error_of(task.rank))
    if report is None or not _is_of_user(report):
        return None
    text = _ADDRESS.sub("0x", f"{report.kinds[0]}: {report.message}")
    return RaisedError(task=str(task), rank=task.rank, step=report.step, text=text)


def _is_of_user(report: ErrorReport) -> bool:
    """Return whether user code raised the exception: not trainkit, and not because the connection to a rank
    was lost.
    """
    return not report.is_secondary and not _OURS.intersection(report.kinds)


def repeated(again: Iterable[RaisedError]) -> str | None:
    """Return why a run whose exceptions were repeated is given up; None if none was."""
    first = min(again, key=lambda raised: raised.rank, default=None)
    if first is None:
        return None
    when = "while starting" if first.step is None else f"in step {first.step}"
    return f"gave up: rank {first.rank} raised the same exception twice in the same place, {when}"


class RestartPolicy:
    """Counts the failures of a run, and decides when to give up.

    Args:
        max_restarts: as in the config.

    Example:
        >>> policy = RestartPolicy(max_restarts=1)
        >>> policy.refuse(Fault(step=5, begun_at=0, reached=3, newer=True))
        >>> policy.refuse(Fault(step=5, begun_at=3, reached=4, newer=True))
        'gave up after 1 restarts: 2 attempts failed in step 5, whatever was saved between them'
    """

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self._raised: set[RaisedError] = set()
        self._in_step: Counter[int] = Counter()
        self._early = 0
        self.no_progress = 0
        """Failures in a row without a newer checkpoint."""

    def advance(self) -> None:
        """Record a newer checkpoint of an attempt that did not fail."""
        self.no_progress = self._early = 0

    def refuse(self, fault: Fault, *, lost: bool = False, remark: str = "") -> str | None:
        """Count a failure; return why the run is not restarted, or None if it is.

        Args:
            fault: the failure.
            lost: whether the run continues without the failed replica.
            remark: text to add after the checkpoint that was reached.
        """
        if fault.newer:
            self.no_progress = 0
        if lost:
            return None
        again = fault.raised & self._raised
        self._raised |= fault.raised
        self._count(fault)
        if again:
            return repeated(again)
        if self.no_progress > self._max:
            what = f" that got no further than the checkpoint of step {fault.reached}{remark}"
        elif fault.step is not None and self._in_step[fault.step] > self._max:
            count = self._in_step[fault.step]
            what = f": {count} attempts failed in step {fault.step}, whatever was saved between them"
        elif self._early > self._max:
            what = f": {self._early} attempts in a row raised an exception within their first two steps"
        else:
            return None
        return f"gave up after {self._max} restarts{what}"

    def _count(self, fault: Fault) -> None:
        self.no_progress += 1
        early = bool(fault.raised) and fault.step is not None and fault.step <= fault.begun_at + 1
        self._early = self._early + 1 if early else 0
        if fault.step is not None:
            self._in_step[fault.step] += 1
