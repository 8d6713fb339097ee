"""Restart single tasks when they die, while the others continue: workers without state, and the evaluator.

A task that dies before it has begun is restarted 1 s later, then 2, 4 ... 60 s. A worker that dies more than
`max_restarts` times in a row without progress of the run ends the run; an evaluator that dies so often over one
checkpoint is given up, and the training continues without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from trainkit.cluster.tasks import Task
from trainkit.errors import CrashLoopError
from trainkit.run.folder.restart_record import Restart, record_restart
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import Heartbeat, HeartbeatReading, read_heartbeat
from trainkit.run.session.evaluator_end import EvaluatorEnd, report_end
from trainkit.run.supervisor.failure import Failure
from trainkit.run.supervisor.restart_policy import RaisedError, raised_by

__all__ = ["TaskRestarter"]

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
    """When it is restarted; None: it runs, or is not restarted."""
    raised: set[RaisedError] = field(default_factory=set)
    """The exceptions of user code that it has raised."""


class TaskRestarter:
    """Counts the deaths of the tasks of one attempt that may be restarted alone.

    Args:
        tasks: those tasks.
        folder: holds their heartbeats and error reports.
        max_restarts: deaths of one task in a row without progress that are tolerated.
        log: logs a line about each death.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        folder: RunFolder,
        max_restarts: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = {task.rank: task for task in tasks}
        self._records = {rank: _RestartHistory() for rank in self._tasks}
        self._folder, self._max_restarts, self._log, self._clock = folder, max_restarts, log, clock

    @property
    def pending(self) -> bool:
        """Whether a task waits to be restarted."""
        return any(record.due is not None for record in self._records.values())

    def may_restart(self, failure: Failure) -> bool:
        """Return whether the failed task is one of these, and a restart may help."""
        task = self._tasks.get(failure.rank)
        return task is not None and (task.is_evaluator or not failure.is_permanent)

    def restart_count(self, rank: int) -> int:
        """Return how often a task was restarted alone."""
        record = self._records.get(rank)
        return 0 if record is None else record.life

    def on_death(self, failure: Failure) -> None:
        """Decide whether and when a task that has died is restarted.

        Raises:
            CrashLoopError: it died repeatedly without progress of the run, or raised the same exception twice in the
                same place.
        """
        task, record = self._tasks[failure.rank], self._records[failure.rank]
        heartbeat = read_heartbeat(self._folder.heartbeat_of(failure.rank))
        reached = _step(heartbeat if task.is_evaluator else read_heartbeat(self._folder.heartbeat_of(0)))
        record.no_progress = 1 if reached > record.reached else record.no_progress + 1
        record.reached = max(record.reached, reached)
        record.died_before_start = (
            record.died_before_start + 1 if heartbeat is None or heartbeat.phase == "start" else 0
        )
        raised = raised_by(self._folder, task)
        twice = raised is not None and raised in record.raised
        if raised is not None:
            record.raised.add(raised)
        if twice or record.no_progress > self._max_restarts:
            self._give_up(failure, task, record, twice=twice)
            return
        wait_s = min(2.0 ** (record.died_before_start - 1), _LONGEST_S) if record.died_before_start else 0.0
        record.due = self._clock() + wait_s
        when = f" in {wait_s:g} s" if wait_s else ""
        step = None if heartbeat is None else heartbeat.step
        restart = Restart(kind="alone", cause=failure.headline, step=step, rank=failure.rank, task=str(task))
        record_restart(self._folder.path, restart)
        self._log(f"{failure.headline} Starting {task} again{when}, alone: the others go on.")

    def _give_up(self, failure: Failure, task: Task, record: _RestartHistory, *, twice: bool) -> None:
        count = f"gave up after {self._max_restarts} restarts of {task} alone"
        no_further = f"{count} that got no further than step {record.reached}"
        if twice:
            no_further = count = f"gave up: {task} raised the same exception twice in the same place"
        if not task.is_evaluator:
            raise CrashLoopError(f"{no_further}: {failure.error()}")
        words = failure.headline
        report_end(self._folder, EvaluatorEnd(status="failed", reason=f"{words} Evaluation {count}."))
        self._log(f"{words} Evaluation {count}; the training goes on without it.")

    def due(self) -> list[Task]:
        """Return the tasks to start now, after removing the files of their previous start."""
        now = self._clock()
        ranks = [rank for rank, record in self._records.items() if record.due is not None and record.due <= now]
        for rank in ranks:
            self._records[rank].due = None
            self._records[rank].life += 1
            self._folder.error_of(rank).unlink(missing_ok=True)
            Heartbeat(self._folder.heartbeat_of(rank)).close()  # its time limit begins now, not with the attempt
        return [self._tasks[rank] for rank in ranks]

    def stop_restarting(self, *, evaluator: bool = False) -> None:
        """Restart no more tasks, because the training has ended: with `evaluator` not the evaluator either."""
        for rank, task in self._tasks.items():
            if evaluator or not task.is_evaluator:
                self._records[rank].due = None


def _step(heartbeat: HeartbeatReading | None) -> int:
    return 0 if heartbeat is None else heartbeat.step
