"""One attempt at a run: start every rank in its own process, and watch all ranks until they have ended."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Final

from trainkit.cluster.tasks import Identity, Task
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import MemoryEvents, ProcessEvidence, TimeLimits, Watch
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup, worker_environ
from trainkit.run.signals import RESIZE_SIGNAL, Reason, StopFlag, signal_of
from trainkit.run.supervisor.failure import Failure, hanging, is_clean, root_cause
from trainkit.run.supervisor.restart_policy import TaskRestarter
from trainkit.storage import Presence
from trainkit.strategies.rendezvous_store import Rendezvous
from trainkit.trainer.ownership import print_notice

_GRACE_S: Final = 0.1
"""Seconds that the other ranks have to write their error reports after one has failed."""
_GRACE_AFTER_LOSS_S: Final = 1.0
"""The same for a failed rank that only lost its connection to another: the root cause may be the last to exit."""
_ENDING_S: Final = 10.0
"""Seconds that a process that has ended may take to be reaped on a busy machine."""
_REPORTED_S: Final = 30.0
"""Seconds that a rank may live after its error report, unless it is saving."""
_SHUTDOWN_GRACE_S: Final = 5.0
"""Seconds that auxiliary tasks have to end after the training."""


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """The settings for starting, watching and restarting the ranks of a run."""

    max_restarts: int = 3
    """Bounds the restarts, see `trainkit.run.supervisor.restart_policy`; 0 never restarts."""
    min_replicas: int | None = None
    """The run continues without lost replicas as long as this many are left; None: only with all."""
    retry_s: float = 60.0
    """Seconds until a lost replica is tried again."""
    limits: TimeLimits = TimeLimits()  # noqa: RUF009 - frozen
    """Longest times without progress."""
    pass_fds: Sequence[int] = ()
    """File descriptors that every worker inherits: the lock of the folder."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers besides those of this process: the plan, and the secrets, which are not in any file."""
    auxiliary_ranks: Collection[int] = ()
    """Ranks that serve the rank that trains, and end with it."""
    replaceable: Collection[int] = ()
    """Ranks that are restarted alone when they die, while the others continue."""
    note_without_checkpoint: str = "There is no checkpoint to restart from."
    """Note on a failure without a checkpoint."""
    log: Callable[[str], None] = print_notice
    """Function that logs restarts, and replicas lost and retried."""


class AttemptRunner:
    """Starts the ranks of a run, once for every attempt.

    `groups` creates the worker group of an attempt, not started: (attempt number, callback for exits) -> group.
    `may_return` returns whether a lost replica may be tried again.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: SupervisorSettings,
        *,
        may_return: Callable[[], bool],
        folder: RunFolder,
        command: Sequence[str],
        groups: Callable[[int, Callable[[ProcessExit], None]], WorkerGroup],
        rendezvous: Rendezvous,
    ) -> None:
        self._may_return = may_return
        self._settings = settings
        self._folder = folder
        self._command = command
        self._groups = groups
        self._rendezvous = rendezvous
        self._environ = {**os.environ, **settings.environ}
        self._token = token_hex(32)
        self._auxiliary_ranks = frozenset(settings.auxiliary_ranks)
        alone = frozenset(task.rank for task in tasks if settings.max_restarts or task.is_evaluator)
        self._replaceable = frozenset(settings.replaceable) & alone  # an evaluator never ends a run
        self._memory = MemoryEvents()
        self._presence = Presence(folder.path)
        self._begin(tasks)
        # Its put is safe in a signal handler.
        self.events: queue.SimpleQueue[ProcessExit | Reason] = queue.SimpleQueue()
        self.stop = StopFlag(self.events.put)

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Reset the state that belongs to one attempt."""
        self._tasks = tuple(tasks)
        self._evidence = ProcessEvidence(self._folder, memory=self._memory)
        self._watcher = Watch(self._settings.limits, self._folder)
        self._asked_to_resize = False
        self._trained_at: float | None = None  # when the training ended, if there are auxiliary ranks
        self._rank0_ended_at: float | None = None  # when rank 0 ended cleanly
        self._announced_waiting = False
        self._ended: set[int] = set()  # ranks that this process ended: their exit is expected
        self._replacing = TaskRestarter(
            tasks={task.rank: task for task in tasks if task.rank in self._replaceable},
            folder=self._folder,
            max_restarts=self._settings.max_restarts,
            log=self._settings.log,
        )

    def run(self, attempt: int, tasks: Sequence[Task], *, continues_at: int | None) -> Failure | None:
        """Start the tasks of an attempt and watch them until all have ended; return the first failure.

        The attempt continues from the checkpoint of a step, or from the start.
        """
        self._folder.begin()
        self._folder.open_live()
        self._begin(tasks)
        with self._groups(attempt, self.events.put) as group:
            self._evidence = ProcessEvidence(self._folder, lambda: group.marks, memory=self._memory)
            self._watcher = Watch(
                self._settings.limits,
                self._folder,
                auxiliary_ranks=self._auxiliary_ranks,
                pid_of=self._evidence.pid,
                asked_to_stop=lambda: self.stop.requested is not None,
            )
            for task in tasks:
                self._start(group, task, attempt)
            self._rendezvous.open()
            return self._watch(group, attempt, continues_at)

    def _start(self, group: WorkerGroup, task: Task, attempt: int) -> None:
        identity = Identity(
            task=task,
            num_ranks=len(self._tasks) - (0 if task.is_evaluator else len(self._evaluators)),
            store=self._rendezvous.address,
            prefix=f"attempt/{attempt}",
            attempt=attempt,
            life=self._replacing.restart_count(task.rank) if task.rank in self._replaceable else 0,
            token=self._token,
        )
        environ = worker_environ(self._environ, identity)
        log = self._folder.log_of(task.rank) if task.rank > 0 else None
        group.start(task.rank, self._command, environ, log)

    def _watch(self, group: WorkerGroup, attempt: int, continues_at: int | None) -> Failure | None:
        if self.stop.requested:  # between two attempts
            self._ask_to_stop(group, self.stop.requested)
        while True:
            for task in self._replacing.due() if self._replaceable else ():
                self._start(group, task, attempt)
            self._check_trained()
            self._kill_stragglers(group)
            if not group.running and not self._replacing.pending:
                group.join()  # afterwards the exits of all processes are in the queue
                if self.events.empty():
                    return None
            event = self._next_event(self._watcher.interval_s)
            self._evidence.look(task.rank for task in self._tasks)
            failure = self._poll(group, continues_at) if event is None else self._handle_event(group, attempt, event)
            if failure is not None:
                if not self._auxiliary_ranks - self._evaluators:
                    wait_for_owner_save(self._folder, group, failure)
                return failure

    def _poll(self, group: WorkerGroup, continues_at: int | None) -> Failure | None:
        """Check the running ranks; return the failure of one that hangs, unless that rank is restarted alone.

        Raises:
            StorageError: the run folder was removed, and the heartbeats with it.
        """
        self._presence.check()
        lingering = self._lingering(group)
        if lingering:
            failure = root_cause(self._folder, (), lingering, self._evidence)
        else:
            overdue = self._watcher.look(group.running)
            if overdue is None:
                self._request_resize(group, continues_at)
                return None
            failure = hanging(self._folder, overdue, group.running, self._evidence)
            stacks = group.stacks(failure.rank, self._folder.stacks_of(failure.rank))
            failure = replace(failure, detail=stacks)
        if not self._replacing.may_restart(failure):
            return failure
        self._end(group, failure.rank)
        self._replacing.on_death(failure)
        return None

    def _lingering(self, group: WorkerGroup) -> list[int]:
        """Return the ranks that reported an error long ago and have not exited."""
        found = []
        for rank in group.running:
            reported_s = self._evidence.reported_for_s(rank)
            if reported_s is not None and reported_s > _REPORTED_S:
                heartbeat = read_heartbeat(self._folder.heartbeat_of(rank))
                found += [rank] * (heartbeat is None or heartbeat.phase != "save")
        return found

    def _handle_event(self, group: WorkerGroup, attempt: int, event: ProcessExit | Reason) -> Failure | None:
        """Handle one event; return the failure that ends the attempt, if the event is one."""
        if not isinstance(event, ProcessExit):
            self._ask_to_stop(group, event)
            return None
        if event.attempt != attempt or self._is_expected(event.rank):
            return None
        if is_clean(self._folder, event, stopping=self.stop.requested is not None):
            self._on_exit(event.rank)
            return None
        failure, exits = self._first_failure(group, attempt, event)
        each = [root_cause(self._folder, [one], (), self._evidence) for one in exits]
        if not all(self._replacing.may_restart(one) for one in each):
            return failure
        for one in each:
            self._replacing.on_death(one)
        return None

    def _is_expected(self, rank: int) -> bool:
        if rank in self._ended:
            self._ended.discard(rank)
            return True
        expected = self._auxiliary_ranks - (self._evaluators if self._rank0_ended_at is None else frozenset())
        return self._trained_at is not None and rank in expected

    def _on_exit(self, rank: int) -> None:
        if rank == 0 and self._auxiliary_ranks:
            self._rank0_ended_at = time.monotonic()
            self._trained_at = self._trained_at or self._rank0_ended_at
            self._replacing.stop_restarting(evaluator=True)

    def _check_trained(self) -> None:
        """Stop restarting workers once the training has ended, while rank 0 waits for the evaluator."""
        if self._trained_at is None and self._evaluators and self._folder.trained.exists():
            self._trained_at = time.monotonic()
            self._replacing.stop_restarting()

    def _kill_stragglers(self, group: WorkerGroup) -> None:
        """Kill auxiliary ranks some time after the training has ended, and the evaluator some time after rank 0, which
        waits for it.
        """
        if self._trained_at is None or time.monotonic() < self._trained_at + _SHUTDOWN_GRACE_S:
            return
        left, kept = set(group.running), self._evaluators
        if self._rank0_ended_at is not None and time.monotonic() >= self._rank0_ended_at + _SHUTDOWN_GRACE_S:
            kept = frozenset()
        for rank in left & self._auxiliary_ranks - kept:
            self._end(group, rank)
        if left & kept and self._rank0_ended_at is None and not self._announced_waiting:
            self._announced_waiting = True
            self._settings.log("The training has ended. Waiting for the evaluator to finish.")

    @property
    def _evaluators(self) -> frozenset[int]:
        return frozenset(task.rank for task in self._tasks if task.is_evaluator)

    def _end(self, group: WorkerGroup, rank: int) -> None:
        self._ended.add(rank)
        group.end(rank)

    def has_progressed(self, rank: int, continues_at: int | None) -> bool:
        """Return whether a rank of the current or last attempt has completed a step in it."""
        heartbeat = read_heartbeat(self._folder.heartbeat_of(rank))
        return heartbeat is not None and heartbeat.step > (continues_at or 0)

    def _request_resize(self, group: WorkerGroup, continues_at: int | None) -> None:
        """Ask a training group once to save and end when a lost replica is due; the next attempt includes
        that replica.
        """
        if self._may_return() and not self._asked_to_resize and self.has_progressed(0, continues_at):
            self._asked_to_resize = True
            group.signal(RESIZE_SIGNAL)

    def _next_event(self, timeout_s: float) -> ProcessExit | Reason | None:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _ask_to_stop(self, group: WorkerGroup, reason: Reason) -> None:
        group.signal(signal_of(reason))

    def _first_failure(self, group: WorkerGroup, attempt: int, first: ProcessExit) -> tuple[Failure, list[ProcessExit]]:
        """Return the root failure, and all exits within a short time of the first."""
        exits, begun = [first], time.monotonic()
        while True:
            left = begun + self._grace_s(group, exits) - time.monotonic() if group.running else 0.0
            if left <= 0 and self.events.empty():  # an exit that has been reported counts in any case
                break
            event = self._next_event(max(min(left, _GRACE_S), 0.0))
            self._evidence.look(task.rank for task in self._tasks)
            if event is not None and not isinstance(event, ProcessExit):
                self._ask_to_stop(group, event)
            elif event is not None and event.attempt == attempt and not self._is_expected(event.rank):
                if is_clean(self._folder, event, stopping=self.stop.requested is not None):
                    self._on_exit(event.rank)
                else:
                    exits.append(event)
        ended = {one.rank for one in exits}
        running = [rank for rank in group.running if rank not in ended]
        return root_cause(self._folder, exits, running, self._evidence), exits

    def _grace_s(self, group: WorkerGroup, exits: list[ProcessExit]) -> float:
        """Return the seconds to wait for failures of other ranks: longer if all failed ranks only lost a connection."""
        running = group.running
        reports = [self._evidence.report(rank) for rank in (*(one.rank for one in exits), *running)]
        if any(report is not None and not report.is_secondary for report in reports):
            return _GRACE_S
        if any(self._evidence.report(one.rank) is None for one in exits):
            return _GRACE_S
        return _ENDING_S if any(self._evidence.has_ended(rank) for rank in running) else _GRACE_AFTER_LOSS_S


_NOTICE_S: Final = 1.0
"""Seconds that rank 0 may take to notice the loss of another rank and begin to save."""
_SAVE_S: Final = 120.0
"""Seconds that the save may take."""
_WORKING_PHASES: Final = ("data", "forward", "backward", "reduce", "evaluate", "save")
"""Phases in which rank 0 may notice a loss, or save."""


def wait_for_owner_save(folder: RunFolder, group: WorkerGroup, failure: Failure) -> None:
    """Wait while rank 0 saves, or is about to save because it has lost another rank."""
    begun = time.monotonic()
    while 0 in group.running and failure.rank != 0 and not failure.hang:
        heartbeat, waited = read_heartbeat(folder.heartbeat_of(0)), time.monotonic() - begun
        if heartbeat is None or heartbeat.phase not in _WORKING_PHASES or waited > _SAVE_S:
            return
        if heartbeat.phase != "save" and waited > _NOTICE_S:
            return
        time.sleep(0.02)
