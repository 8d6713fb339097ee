"""Tasks that are started again alone when they die, while the others go on: workers that hold nothing, the evaluator.

A task that dies before it has begun anything is started again 1 s later, then 2, 4 ... 60 s. A worker that dies more
than `max_restarts` times in a row without the run having come any further ends the run; an evaluator that dies so often
over one checkpoint is given up, and the training goes on without it.
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
    """What became of a task so far."""

    life: int = 0
    reached: int = -1
    """How far things had come when it last died."""
    no_progress: int = 0
    """Deaths in a row with things no further than that."""
    died_before_start: int = 0
    """Deaths in a row before it had begun anything."""
    due: float | None = None
    """When it is started again; None: it runs, or is not."""
    raised: set[RaisedError] = field(default_factory=set)
    """The exceptions of user code that it has raised."""


class TaskRestarter:
    """Keeps count of the tasks of one attempt that may be started again alone.

    Args:
        tasks: those tasks.
        folder: holds their pulses and last words.
        max_restarts: deaths of one task in a row without progress that are put up with.
        log: receives a line for each death.
        clock: seconds that only rise.
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
        """Whether a task waits to be started again."""
        return any(record.due is not None for record in self._records.values())

    def may_restart(self, failure: Failure) -> bool:
        """Whether it is the failure of one of these, which a new start may mend."""
        task = self._tasks.get(failure.rank)
        return task is not None and (task.is_evaluator or not failure.is_permanent)

    def restart_count(self, rank: int) -> int:
        """Times that a task was started again alone."""
        record = self._records.get(rank)
        return 0 if record is None else record.life

    def on_death(self, failure: Failure) -> None:
        """Decide about a task that has died: when it is started again, if it is.

        Raises:
            CrashLoopError: it dies again and again and the run comes no further, or it raised the same exception twice
                in the same place.
        """
        task, record = self._tasks[failure.rank], self._records[failure.rank]
        pulse = read_heartbeat(self._folder.heartbeat_of(failure.rank))
        reached = _step(pulse if task.is_evaluator else read_heartbeat(self._folder.heartbeat_of(0)))
        record.no_progress = 1 if reached > record.reached else record.no_progress + 1
        record.reached = max(record.reached, reached)
        record.died_before_start = record.died_before_start + 1 if pulse is None or pulse.phase == "start" else 0
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
        step = None if pulse is None else pulse.step
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
        """The tasks to start now, each with a life of its own and nothing left of the one before."""
        now = self._clock()
        ranks = [rank for rank, record in self._records.items() if record.due is not None and record.due <= now]
        for rank in ranks:
            self._records[rank].due = None
            self._records[rank].life += 1
            self._folder.error_of(rank).unlink(missing_ok=True)
            Heartbeat(self._folder.heartbeat_of(rank)).close()  # its time begins now, not with the attempt
        return [self._tasks[rank] for rank in ranks]

    def stop_restarting(self, *, evaluator: bool = False) -> None:
        """Start no task again, because the training has ended: with `evaluator` not the evaluator either."""
        for rank, task in self._tasks.items():
            if evaluator or not task.is_evaluator:
                self._records[rank].due = None


def _step(pulse: HeartbeatReading | None) -> int:
    return 0 if pulse is None else pulse.step
