"""Decide which failures are worth another attempt at the run or another start of a task, and which end the run.

A run is given up

- when user code raises an exception that it raised before: same rank, same step, same text;
- after `max_restarts` restarts in a row without a newer checkpoint;
- after `max_restarts` restarts because of failures in one step, regardless of checkpoints between them;
- after `max_restarts` restarts in a row whose attempts raised an exception within their first two steps.

The last rule ends a run that advances by one step with each restart. A lost replica (docs/runs.md#elastic) counts in
none of the rules.

Workers without state, and the evaluator, are restarted alone while the others continue. Such a task that dies before it
has begun is restarted 1 s later, then 2, 4 ... 60 s. A worker that dies more than `max_restarts` times in a row without
progress of the run ends the run; an evaluator that dies so often over one checkpoint is given up, and the training
continues without it.

Launchers and process backends restart all processes without knowing which one failed.

Rank 0 of the new group finds the error reports of the last one in the run folder. It records the restart, and refuses
it if user code raised the same exception twice in the same place.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final

from trainkit.cluster.tasks import Task
from trainkit.errors import CrashLoopError
from trainkit.run.agent.failure import Failure
from trainkit.run.folder.run_folder import Restart, RunFolder, record_restart
from trainkit.run.process.error_report import read_error_report, reports_in
from trainkit.run.process.heartbeat import Heartbeat, read_heartbeat
from trainkit.run.session.auxiliary import EvaluatorEnd, report_end
from trainkit.trainer.manifest import list_complete

_OWN_ERRORS: Final = frozenset({"TrainkitError", "RankError"})
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
    """Exception of each rank, if user code raised the exception that ended the attempt; otherwise empty."""


def fault_of(folder: RunFolder, tasks: Iterable[Task], rank: int, *, begun_at: int | None, reached: int) -> Fault:
    """Return the facts about a failed attempt that the restart policy needs."""
    errors = frozenset(error for task in tasks if (error := raised_by(folder, task)) is not None)
    heartbeat = read_heartbeat(folder.heartbeat_of(rank))
    return Fault(
        step=None if heartbeat is None else heartbeat.step,
        begun_at=begun_at or 0,
        reached=reached,
        newer=reached != begun_at,
        raised=errors if any(error.rank == rank for error in errors) else frozenset(),
    )


def raised_by(folder: RunFolder, task: Task) -> RaisedError | None:
    """Return the exception of user code that a task reported; None if it reported none, or another kind of error."""
    report = read_error_report(folder.error_of(task.rank))
    if report is None or report.is_secondary or _OWN_ERRORS.intersection(report.kinds):
        return None
    text = _ADDRESS.sub("0x", f"{report.kinds[0]}: {report.message}")
    return RaisedError(task=str(task), rank=task.rank, step=report.step, text=text)


def repeated(errors: Iterable[RaisedError]) -> str | None:
    """Return why a run whose exceptions were repeated is given up; None if none was."""
    first = min(errors, key=lambda error: error.rank, default=None)
    if first is None:
        return None
    when = "while starting" if first.step is None else f"in step {first.step}"
    return f"gave up: rank {first.rank} raised the same exception twice in the same place, {when}"


@dataclass
class RestartPolicy:
    """Counts the failures of a run, and decides when to give up.

    Example:
        >>> policy = RestartPolicy(max_restarts=1)
        >>> policy.refuse(Fault(step=5, begun_at=0, reached=3, newer=True))
        >>> policy.refuse(Fault(step=5, begun_at=3, reached=4, newer=True))
        'gave up after 1 restarts: 2 attempts failed in step 5, regardless of checkpoints between them'
    """

    max_restarts: int
    no_progress: int = 0
    """Failures in a row without a newer checkpoint."""
    _early: int = 0
    """Failures in a row within the first two steps of an attempt."""
    _in_step: Counter[int] = field(default_factory=Counter)
    _raised: set[RaisedError] = field(default_factory=set)

    def advance(self) -> None:
        """Record a newer checkpoint of an attempt that did not fail."""
        self.no_progress = self._early = 0

    def refuse(self, fault: Fault, *, lost: bool = False, remark: str = "") -> str | None:
        """Count a failure; return why the run is not restarted, or None if it is."""
        if fault.newer:
            self.no_progress = 0
        if lost:
            return None
        repeats = fault.raised & self._raised
        self._raised |= fault.raised
        self.no_progress += 1
        early = bool(fault.raised) and fault.step is not None and fault.step <= fault.begun_at + 1
        self._early = self._early + 1 if early else 0
        if fault.step is not None:
            self._in_step[fault.step] += 1
        if repeats:
            return repeated(repeats)
        if self.no_progress > self.max_restarts:
            reason = f" without progress beyond the checkpoint of step {fault.reached}{remark}"
        elif fault.step is not None and self._in_step[fault.step] > self.max_restarts:
            count = self._in_step[fault.step]
            reason = f": {count} attempts failed in step {fault.step}, regardless of checkpoints between them"
        elif self._early > self.max_restarts:
            reason = f": {self._early} attempts in a row raised an exception within their first two steps"
        else:
            return None
        return f"gave up after {self.max_restarts} restarts{reason}"


@dataclass(slots=True)
class _Member:
    """One replica slot, whether it takes part in the next attempt or not."""

    task: Task
    """The task as planned; its `index` stays, its rank is assigned again for each attempt."""
    failures: int = 0
    """Failures that it caused since the last checkpoint it took part in."""
    losses: int = 0
    """Times it was lost since then."""
    due: float | None = None
    """Time at which a lost replica is retried; None: it is not lost."""


class ReplicaMembership:
    """Counts the failures and losses of the replicas of a run, and selects those of the next attempt.

    A replica is lost if it causes a failure of a restarted attempt before its first step there is completed, or causes
    two failures without a newer checkpoint in between. Training continues with the others, ranks renumbered from 0, as
    long as `elastic.min_replicas` are left. The lost replica is tried again after `elastic.retry_s`, which doubles with
    each further loss.

    Args:
        tasks: all tasks, as planned.
        min_replicas: the run does not continue with fewer; None: no replica is ever lost, however often it fails.
        ranks_a_replica: tasks that a replica consists of; those that are left over wait for a lost one.
        retry_s: seconds until a lost replica is tried again; doubled by each further loss without a completed step.
        clock: returns monotonic seconds.

    Example:
        >>> tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(3)]
        >>> membership = ReplicaMembership(tasks, min_replicas=2)
        >>> membership.record_failure(0, at_start=True)
        'worker:0 (cpu) is lost: the run continues with 2 of 3 replicas, and retries it in 60 s.'
        >>> membership.next_members()
        ()
        >>> [(str(task), task.rank) for task in membership.tasks]
        [('worker:1', 0), ('worker:2', 1)]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        min_replicas: int | None = None,
        ranks_a_replica: int = 1,
        retry_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = [_Member(task) for task in tasks]
        self._present = list(self._members)
        self._min_replicas, self._ranks_a_replica = min_replicas, ranks_a_replica
        self._retry_s = retry_s
        self._clock = clock

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the current attempt: devices and indices as planned, ranks from 0 without gaps."""
        members = self._present[: len(self._present) // self._ranks_a_replica * self._ranks_a_replica]
        return tuple(replace(member.task, rank=rank) for rank, member in enumerate(members))

    @property
    def is_due(self) -> bool:
        """Whether a lost replica may be tried again."""
        return any(member.due is not None and member.due <= self._clock() for member in self._members)

    @property
    def at_minimum(self) -> bool:
        """Whether a further loss would leave fewer than allowed."""
        return self._min_replicas is not None and (len(self._present) - 1) // self._ranks_a_replica < self._min_replicas

    def next_members(self) -> tuple[str, ...]:
        """Select the replicas of the next attempt: all that are not lost, and all that are due again.

        Returns:
            A line about the replicas that return.
        """
        now = self._clock()
        returning = [member for member in self._members if member.due is not None and member.due <= now]
        for member in returning:
            member.due = None
        self._present = [member for member in self._members if member.due is None]
        if not returning:
            return ()
        names = ", ".join(_name(member.task) for member in returning)
        return (f"tries {names} again: {self._counted} replicas.",)

    def clear_failures(self) -> None:
        """Reset the failure counts of the present replicas, because they have made a newer checkpoint."""
        for member in self._present:
            member.failures = member.losses = 0

    def record_failure(self, rank: int, *, at_start: bool) -> str | None:
        """Record the replica that caused the end of an attempt, possibly before the first step after its restart.

        Returns:
            One line if the replica is lost; None: the next attempt includes it.
        """
        member = self._present[rank]
        member.failures += 1
        if self._min_replicas is None or self.at_minimum or not (at_start or member.failures > 1):
            return None
        wait_s = self._retry_s * 2**member.losses
        member.losses += 1
        member.due = self._clock() + wait_s
        self._present = [other for other in self._present if other is not member]
        return (
            f"{_name(member.task)} is lost: the run continues with {self._counted} replicas, and retries it in "
            f"{wait_s:g} s."
        )

    @property
    def _counted(self) -> str:
        return f"{len(self._present) // self._ranks_a_replica} of {len(self._members) // self._ranks_a_replica}"


def _name(task: Task) -> str:
    return f"{task} ({task.device})"


_LONGEST_S: Final = 60.0


@dataclass(slots=True)
class _RestartHistory:
    """History of one task."""

    life: int = 0
    reached: int = -1
    """The step that had been reached when the task last died."""
    no_progress: int = 0
    """Deaths in a row without progress beyond `reached`."""
    died_before_start: int = 0
    """Deaths in a row before it had begun."""
    due: float | None = None
    """Time of its restart; None: it is running, or is not restarted."""
    raised: set[RaisedError] = field(default_factory=set)
    """The exceptions of user code that it has raised."""


@dataclass(kw_only=True, eq=False)
class TaskRestarter:
    """Counts the deaths of the tasks of one attempt that may be restarted alone."""

    tasks: Mapping[int, Task]
    """The tasks that may be restarted alone, by rank."""
    folder: RunFolder
    max_restarts: int
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _records: defaultdict[int, _RestartHistory] = field(default_factory=partial(defaultdict, _RestartHistory))

    @property
    def pending(self) -> bool:
        """Whether a task waits to be restarted."""
        return any(record.due is not None for record in self._records.values())

    def may_restart(self, failure: Failure) -> bool:
        """Return whether the failed task is one of `tasks`, and a restart may help."""
        task = self.tasks.get(failure.rank)
        return task is not None and (task.is_evaluator or not failure.is_permanent)

    def restart_count(self, rank: int) -> int:
        """Return the number of restarts of one task."""
        return self._records[rank].life

    def on_death(self, failure: Failure) -> None:
        """Decide whether and when a task that has died is restarted.

        Raises:
            CrashLoopError: it died repeatedly without progress of the run, or raised the same exception twice in the
                same place.
        """
        task, record = self.tasks[failure.rank], self._records[failure.rank]
        heartbeat = read_heartbeat(self.folder.heartbeat_of(failure.rank))
        leading = heartbeat if task.is_evaluator else read_heartbeat(self.folder.heartbeat_of(0))
        reached = 0 if leading is None else leading.step
        record.no_progress = 1 if reached > record.reached else record.no_progress + 1
        record.reached = max(record.reached, reached)
        record.died_before_start = (
            record.died_before_start + 1 if heartbeat is None or heartbeat.phase == "start" else 0
        )
        raised = raised_by(self.folder, task)
        twice = raised is not None and raised in record.raised
        if raised is not None:
            record.raised.add(raised)
        if twice or record.no_progress > self.max_restarts:
            count = f"gave up after {self.max_restarts} restarts of {task} alone"
            no_further = f"{count} without progress beyond step {record.reached}"
            if twice:
                no_further = count = f"gave up: {task} raised the same exception twice in the same place"
            if not task.is_evaluator:
                raise CrashLoopError(f"{no_further}: {failure.error()}")
            reason = f"{failure.headline} Evaluation {count}"
            report_end(self.folder, EvaluatorEnd(status="failed", reason=f"{reason}."))
            self.log(f"{reason}; the training continues without it.")
            return
        wait_s = min(2.0 ** (record.died_before_start - 1), _LONGEST_S) if record.died_before_start else 0.0
        record.due = self.clock() + wait_s
        when = f" in {wait_s:g} s" if wait_s else ""
        step = None if heartbeat is None else heartbeat.step
        restart = Restart(kind="alone", cause=failure.headline, step=step, rank=failure.rank, task=str(task))
        record_restart(self.folder.path, restart)
        self.log(f"{failure.headline} Restarting only {task}{when}; the others continue.")

    def due(self) -> list[Task]:
        """Return the tasks to start now, after removing the files of their previous start."""
        now = self.clock()
        ranks = [rank for rank, record in self._records.items() if record.due is not None and record.due <= now]
        for rank in ranks:
            self._records[rank].due = None
            self._records[rank].life += 1
            self.folder.error_of(rank).unlink(missing_ok=True)
            Heartbeat(self.folder.heartbeat_of(rank)).close()  # its time limit begins now, not with the attempt
        return [self.tasks[rank] for rank in ranks]

    def stop_restarting(self, *, evaluator: bool = False) -> None:
        """Stop restarting tasks, because the training has ended; `evaluator` includes the evaluator."""
        for rank, task in self.tasks.items():
            if evaluator or not task.is_evaluator:
                self._records[rank].due = None


@dataclass(frozen=True, kw_only=True)
class ExternalRestart:
    """The exceptions of the earlier groups, and whether the new group may begin."""

    raised: frozenset[RaisedError]
    """The exceptions of all earlier groups."""
    refusal: str | None
    """The reason why the group must not begin; None if it may."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the exceptions as JSON for the next group."""
        return [asdict(error) for error in self.raised]


def record_relaunch(
    folder: RunFolder, failure: Failure | None, *, before: Collection[dict[str, Any]], tolerant: bool = False
) -> ExternalRestart:
    """Record that all tasks were restarted, after a failure or without a report; return whether they may begin.

    `before` is `ExternalRestart.to_json` of the last group. Elastic runs are tolerant: they continue without the host
    that fails.
    """
    headline, rank = ("The processes had ended.", None) if failure is None else (failure.headline, failure.rank)
    tasks = [Task(role="rank", index=number, rank=number) for number in sorted(reports_in(folder))]
    errors = frozenset(error for task in tasks if (error := raised_by(folder, task)) is not None)
    if not any(error.rank == rank for error in errors):
        errors = frozenset()
    earlier = frozenset(RaisedError(**values) for values in before)
    refusal = None if tolerant else repeated(errors & earlier)
    if refusal is None:
        newest = list_complete(folder.checkpoints)
        step = next((error.step for error in errors if error.rank == rank), None)
        checkpoint = newest[0].step if newest else None
        restart = Restart(kind="all", cause=headline, step=step, rank=rank, checkpoint=checkpoint)
        record_restart(folder.path, restart)
    return ExternalRestart(raised=errors | earlier, refusal=refusal)
