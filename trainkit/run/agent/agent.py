"""The agent of a host: it starts the ranks of an attempt, watches them, and returns the failure that ends it.

Every way to start a run is an agent with a worker group; what differs between them is a `Launch`: this machine alone
(`trainkit.run.agent.supervisor`), one host of an external launch (`trainkit.run.rendezvous.join`), one process
of an engine (`trainkit.run.backends.engine`).
"""

from __future__ import annotations

import queue
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final

from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import StopKind, TrainkitError
from trainkit.files import Presence
from trainkit.run.agent.failure import (
    Failure,
    MemoryEvents,
    ProcessEvidence,
    facts_of,
    failure_of,
    first_failure,
    is_clean,
)
from trainkit.run.agent.monitor import Monitor, OverdueRank, TimeLimits
from trainkit.run.agent.policy import TaskRestarter
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.signals import RESIZE_SIGNAL, StopFlag, signal_of
from trainkit.trainer.ownership import print_notice

_REPORTED_S: Final = 30.0
"""Seconds that a rank may live after its error report, unless it is saving."""
_SHUTDOWN_GRACE_S: Final = 5.0
"""Seconds that auxiliary tasks have to end after the training."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The settings for starting, watching and restarting the ranks of a run."""

    max_restarts: int = 3
    """Bounds the restarts, see `trainkit.run.agent.policy`; 0 never restarts."""
    min_replicas: int | None = None
    """The run continues without lost replicas as long as this many are left; None: only with all."""
    ranks_a_replica: int = 1
    """Tasks that a replica consists of."""
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


class Launch(ABC):
    """What differs between the ways to start a run, for the agent of one host; by default it is the only agent.

    Args:
        folder: the run folder.
    """

    signals: ClassVar[Mapping[signal.Signals, StopKind] | None] = None
    """Signals of this process that stop the run; None: the usual ones."""

    sees_all: bool = True
    """Whether all ranks that train together are on this host: otherwise one of them may wait for another host."""
    cwd: Path | None = None
    """Folder in which the workers start; None: that of this process."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @abstractmethod
    def identity(self, task: Task, num_ranks: int, attempt: int, life: int) -> Identity:
        """Return the identity of a task in an attempt with so many ranks here, `life` times restarted alone."""

    @abstractmethod
    def environ(self, identity: Identity) -> dict[str, str]:
        """Return the whole environment of a worker."""

    def log_of(self, task: Task) -> Path | None:
        """Return the file for the output of a task; None: it goes where that of this process goes."""
        return self.folder.log_of(task.rank) if task.rank > 0 else None

    def watched(self, running: Collection[int]) -> Collection[int]:
        """Return the ranks whose heartbeats are compared, of which this host runs some."""
        return running

    def open_store(self) -> None:  # noqa: B027 - most launches have a store already
        """Open the store that the started workers wait for; nothing: another process hosts it."""

    def stop_requested(self) -> StopKind | None:
        """Return the reason of a stop that was requested outside of this process."""
        return None

    def peer_error(self) -> TrainkitError | None:
        """Return the error of another host with which the ranks of this host have to end."""
        return None


class Agent:
    """Starts the ranks of this host, once for every attempt, and watches them until they have ended.

    `groups` creates the worker group of an attempt, not started: (attempt number, callback for exits) -> group.
    `may_resize` returns whether the attempt should end for one with more replicas.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: AgentSettings,
        launch: Launch,
        *,
        command: Sequence[str],
        groups: Callable[[int, Callable[[ProcessExit], None]], WorkerGroup],
        may_resize: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings, self._launch, self._folder = settings, launch, launch.folder
        self._command, self._groups, self._may_resize = command, groups, may_resize
        self._auxiliary_ranks = frozenset(settings.auxiliary_ranks)
        alone = frozenset(task.rank for task in tasks if settings.max_restarts or task.is_evaluator)
        self._replaceable = frozenset(settings.replaceable) & alone  # an evaluator never ends a run
        self._memory = MemoryEvents()
        self._presence = Presence(self._folder.path)
        # Its put is safe in a signal handler.
        self.events: queue.SimpleQueue[ProcessExit | StopKind] = queue.SimpleQueue()
        self.stop = StopFlag(self.events.put, signals=launch.signals)
        self._begin(tasks)

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Reset the state that belongs to one attempt."""
        self._tasks = tuple(tasks)
        self._evidence = ProcessEvidence(self._folder, memory=self._memory)
        self._monitor = Monitor(
            self._settings.limits,
            self._folder,
            sees_all=self._launch.sees_all,
            auxiliary_ranks=self._auxiliary_ranks,
            pid_of=lambda rank: self._evidence.pid(rank),  # noqa: PLW0108 - that of the running attempt
            asked_to_stop=lambda: self.stop.requested is not None,
        )
        self._asked_to_resize = False
        self._trained_at: float | None = None  # when the training ended, if there are auxiliary ranks
        self._rank0_ended_at: float | None = None  # when rank 0 ended cleanly
        self._announced_waiting = False
        self._ended: set[int] = set()  # ranks that this process ended: their exit is expected
        self._restarter = TaskRestarter(
            tasks={task.rank: task for task in tasks if task.rank in self._replaceable},
            folder=self._folder,
            max_restarts=self._settings.max_restarts,
            log=self._settings.log,
        )

    def run(self, attempt: int, tasks: Sequence[Task], *, continues_at: int | None = None) -> Failure | None:
        """Start the tasks of an attempt and watch them until all have ended; return the first failure.

        The attempt continues from the checkpoint of a step, or from the start.

        Raises:
            CrashLoopError: a task that is restarted alone makes no progress.
            StorageError: the run folder was removed, and the heartbeats with it.
            TrainkitError: the error of another host.
        """
        self._begin(tasks)
        with self._groups(attempt, self.events.put) as group:
            self._evidence = ProcessEvidence(self._folder, lambda: group.marks, memory=self._memory)
            for task in tasks:
                self._start(group, task, attempt)
            self._launch.open_store()
            return self._watch(group, attempt, continues_at)

    def _start(self, group: WorkerGroup, task: Task, attempt: int) -> None:
        num_ranks = len(self._tasks) - (0 if task.is_evaluator else len(self._evaluators))
        life = self._restarter.restart_count(task.rank) if task.rank in self._replaceable else 0
        environ = self._launch.environ(self._launch.identity(task, num_ranks, attempt, life))
        group.start(task.rank, self._command, environ, self._launch.log_of(task), cwd=self._launch.cwd)

    def _watch(self, group: WorkerGroup, attempt: int, continues_at: int | None) -> Failure | None:
        if self.stop.requested:  # between two attempts
            group.signal(signal_of(self.stop.requested))
        while True:
            for task in self._restarter.due() if self._replaceable else ():
                self._start(group, task, attempt)
            self._end_auxiliary_tasks(group)
            if not group.running and not self._restarter.pending:
                group.join()  # afterwards the exits of all processes are in the queue
                if self.events.empty():
                    return None
            event = self._next_event(self._monitor.interval_s)
            self._evidence.look(task.rank for task in self._tasks)
            failure = self._poll(group, continues_at) if event is None else self._handle_event(group, attempt, event)
            if failure is not None:
                if not self._auxiliary_ranks - self._evaluators:
                    wait_for_owner_save(self._folder, group, failure)
                return failure

    def _poll(self, group: WorkerGroup, continues_at: int | None) -> Failure | None:
        """Check the running ranks; return the failure of one that hangs, unless that rank is restarted alone."""
        self._presence.check()
        if (reason := self._launch.stop_requested()) is not None:
            self.stop.request(reason)
        if (error := self._launch.peer_error()) is not None:
            raise error
        if lingering := self._lingering(group):
            failure = self._failure(running=lingering)
        else:
            overdue = self._monitor.look(self._launch.watched(group.running))
            if overdue is None or overdue.rank not in group.running:  # another agent ends that rank
                if self._may_resize() and not self._asked_to_resize and self.has_progressed(0, continues_at):
                    self._asked_to_resize = True  # the group saves and ends; the next attempt has the lost replica
                    group.signal(RESIZE_SIGNAL)
                return None
            failure = self._failure(running=group.running, overdue=overdue)
            stacks = group.stacks(failure.rank, self._folder.stacks_of(failure.rank))
            failure = replace(failure, detail=stacks)
        if not self._restarter.may_restart(failure):
            return failure
        self._end(group, failure.rank)
        self._restarter.on_death(failure)
        return None

    def _failure(
        self, *, exits: Sequence[ProcessExit] = (), running: Collection[int] = (), overdue: OverdueRank | None = None
    ) -> Failure:
        return failure_of(self._evidence, facts_of(self._evidence, exits=exits, running=running, overdue=overdue))

    def _lingering(self, group: WorkerGroup) -> list[int]:
        """Return the ranks that reported an error long ago and have not exited."""
        ranks = []
        for rank in group.running:
            reported_s = self._evidence.reported_for_s(rank)
            if reported_s is not None and reported_s > _REPORTED_S:
                heartbeat = read_heartbeat(self._folder.heartbeat_of(rank))
                ranks += [rank] * (heartbeat is None or heartbeat.phase != "save")
        return ranks

    def _handle_event(self, group: WorkerGroup, attempt: int, event: ProcessExit | StopKind) -> Failure | None:
        """Handle one event; return the failure that ends the attempt, if the event is one."""
        exited = self._failed_exit(group, attempt, event)
        if exited is None:
            return None
        failure, exits = self._first_failure(group, attempt, exited)
        deaths = [self._failure(exits=[end]) for end in exits]
        if not all(self._restarter.may_restart(death) for death in deaths):
            return failure
        for death in deaths:
            self._restarter.on_death(death)
        return None

    def _failed_exit(self, group: WorkerGroup, attempt: int, event: ProcessExit | StopKind) -> ProcessExit | None:
        """Return an event that is the exit of a failed rank; handle any other event."""
        if not isinstance(event, ProcessExit):
            group.signal(signal_of(event))
            return None
        is_trained = self._trained_at is not None
        expected = self._auxiliary_ranks - (self._evaluators if self._rank0_ended_at is None else frozenset())
        if event.attempt != attempt or event.rank in self._ended or (is_trained and event.rank in expected):
            self._ended.discard(event.rank)
            return None
        if not is_clean(self._folder, event, stopping=self.stop.requested is not None):
            return event
        if event.rank == 0 and self._auxiliary_ranks:
            self._rank0_ended_at = time.monotonic()
            self._trained_at = self._trained_at or self._rank0_ended_at
            self._restarter.stop_restarting(evaluator=True)
        return None

    def _end_auxiliary_tasks(self, group: WorkerGroup) -> None:
        """Restart no worker once the training has ended; kill those that run on some time later, and the evaluator some
        time after rank 0, which waits for it.
        """
        now = time.monotonic()
        if self._trained_at is None and self._evaluators and self._folder.trained.exists():
            self._trained_at = now
            self._restarter.stop_restarting()
        if self._trained_at is None or now < self._trained_at + _SHUTDOWN_GRACE_S:
            return
        running, spared = set(group.running), self._evaluators
        if self._rank0_ended_at is not None and now >= self._rank0_ended_at + _SHUTDOWN_GRACE_S:
            spared = frozenset()
        for rank in running & self._auxiliary_ranks - spared:
            self._end(group, rank)
        if running & spared and self._rank0_ended_at is None and not self._announced_waiting:
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

    def _next_event(self, timeout_s: float) -> ProcessExit | StopKind | None:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _first_failure(self, group: WorkerGroup, attempt: int, first: ProcessExit) -> tuple[Failure, list[ProcessExit]]:
        """Return the failure that came first, and all exits until it is known."""
        exits, begun = [first], time.monotonic()
        while True:
            ended = {end.rank for end in exits}
            running = [rank for rank in group.running if rank not in ended]
            facts = facts_of(self._evidence, exits=exits, running=running)
            result = first_failure(facts, waited_s=time.monotonic() - begun)
            if isinstance(result, tuple) and self.events.empty():  # an exit that has been reported counts in any case
                return failure_of(self._evidence, facts), exits
            event = self._next_event(min(result, _LOOK_S) if isinstance(result, float) else 0.0)
            if event is not None and (exited := self._failed_exit(group, attempt, event)) is not None:
                exits.append(exited)


_LOOK_S: Final = 0.1
"""Seconds between two looks for the reports of ranks that run."""
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
