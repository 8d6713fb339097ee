"""Start the workers of a run, watch them, restart them from the last checkpoint, and leave no process behind.

start all --> watch exits, heartbeats, stop signals
                all ended cleanly           --> the result
                one failed that is restarted alone --> report it, restart it; the others continue
                one failed or hangs         --> report it, end the others
                    trainkit's own error    --> that error
                    no checkpoint           --> that failure
                    a replica is lost       --> start the others, as long as elastic.min_replicas are left
                    the restart policy refuses (trainkit.run.supervisor.restart_policy) --> CrashLoopError
                    else                    --> restart all; they continue from the newest complete checkpoint
                a lost replica is due       --> the others save and end; restart all, including that one

Tested on Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.cluster.tasks import Task
from trainkit.errors import CrashLoopError, StoppedError, StorageError, TrainkitError, status_of_error
from trainkit.run.folder.restart_record import Restart, record_restart
from trainkit.run.folder.rollbacks import skipped_in
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.signals import REASONS, Reason, stop_error
from trainkit.run.supervisor.attempts import AttemptRunner, SupervisorSettings
from trainkit.run.supervisor.failure import Failure
from trainkit.run.supervisor.restart_policy import Fault, RestartPolicy, fault_of
from trainkit.storage import Presence, as_storage_error, refuse_unwritable
from trainkit.strategies.rendezvous_store import HostedStore, Rendezvous
from trainkit.trainer.manifest import list_complete


def supervise(
    resolved: Path,
    tasks: Sequence[Task],
    settings: SupervisorSettings = SupervisorSettings(),  # noqa: B008 - frozen
    *,
    folder: RunFolder,
    command: Sequence[str] | None = None,
    rendezvous: Rendezvous | None = None,
) -> dict[str, Any]:
    """Run all tasks of a run on this machine, each in its own process, until they have ended.

    Ctrl-C, SIGTERM and SIGHUP are forwarded as a request to save and stop; a second Ctrl-C ends everything at once.
    Call this function from the main thread: other threads receive no signals.

    Args:
        resolved: the config file that the workers read.
        tasks: one per process; rank 0 writes the run folder, and its output goes to the terminal.
        settings: settings for starting, watching and restarting them.
        folder: the run folder; the caller holds its lock.
        command: the command to start instead of `python -m trainkit.run.worker_main RESOLVED`; tests use it.
        rendezvous: the store of the ranks; by default one on the loopback interface, for this run alone.

    Returns:
        The content of `result.json`.

    Raises:
        StoppedError, TerminatedError, HangupError: the run was stopped before the workers could write a result.
        CrashLoopError: restarts make no progress.
        HangError: a rank hangs, and there is no checkpoint to restart from.
        TrainkitError: a worker raised it; TrainingError for any other failure.
    """
    command = command or [*ENTRY, str(resolved)]
    with ExitStack() as stack:
        membership = ReplicaMembership(tasks, min_replicas=settings.min_replicas, retry_s=settings.retry_s)
        attempts = AttemptRunner(
            membership.tasks,
            settings,
            may_return=lambda: membership.is_due,
            folder=folder,
            command=command,
            groups=stack.enter_context(worker_group_factory(command, tasks, pass_fds=settings.pass_fds)),
            rendezvous=rendezvous or stack.enter_context(HostedStore()),
        )
        stack.enter_context(attempts.stop)
        try:
            return _until_done(attempts, membership, folder, settings)
        except KeyboardInterrupt:
            stopped = StoppedError(f"stopped at once. {_last_checkpoint_note(folder)}")
            _record(folder, stopped)
            raise stopped from None
        except TrainkitError as error:
            _record(folder, error)
            raise
        except OSError as error:  # the initial files of an attempt cannot be written
            found = as_storage_error(error, folder.path)
            if found is None:
                raise
            _record(folder, found)
            raise found from error


def _record(folder: RunFolder, error: TrainkitError) -> None:
    """Write the cause that ends the command into the result; rank 0 only knows its own error."""
    status = status_of_error(error)
    found = list_complete(folder.checkpoints)
    last = {"last": str(found[0].folder), "steps": found[0].step} if found else {"last": None, "steps": 0}
    kept = {**last, **skipped_in(folder.checkpoints), "resume": folder.resume_command}
    with contextlib.suppress(OSError):  # the error itself is printed on the terminal
        folder.write_result({**kept, **(folder.read_result() or {}), "status": status, "reason": str(error)})


def _until_done(
    attempts: AttemptRunner, membership: ReplicaMembership, folder: RunFolder, settings: SupervisorSettings
) -> dict[str, Any]:
    max_restarts, log = settings.max_restarts, settings.log
    best, rule, resized = _newest_step(folder), RestartPolicy(max_restarts), False
    for attempt in itertools.count():
        for line in membership.next_members():
            log(line)
            if resized:
                record_restart(folder.path, Restart(kind="returned", cause=line, checkpoint=best))
        failure = attempts.run(attempt, membership.tasks, continues_at=best)
        if failure is None:
            result = _result(folder, attempts.stop.requested)
            if result.get("status") != "resized":
                return result
        else:
            _raise_final(failure, attempts.stop.requested, folder)
            refuse_unwritable(folder.path)
        reached, resized = _newest_step(folder), failure is None
        if reached != best:
            membership.clear_failures()
        if failure is not None:
            if max_restarts == 0 or reached is None:
                raise failure.error("" if reached is not None else settings.note_without_checkpoint)
            task = membership.tasks[failure.rank]
            fault = fault_of(folder, membership.tasks, failure.rank, begun_at=best, reached=reached)
            at_start = attempt > 0 and not attempts.has_progressed(failure.rank, best)
            lost = membership.record_failure(failure.rank, at_start=at_start)
            remark = f", with elastic.min_replicas={len(membership.tasks)} left" if membership.at_minimum else ""
            refusal = rule.refuse(fault, lost=lost is not None, remark=remark)
            if refusal is not None:
                raise CrashLoopError(f"{refusal}: {failure.error()}")
            record_restart(folder.path, _restart(failure, task, fault, lost=lost))
            log(_restarting(failure, lost, reached, f"{rule.no_progress} of {max_restarts}"))
        elif reached != best:
            rule.advance()
        best = reached
    raise AssertionError  # count() never ends


def _restart(failure: Failure, task: Task, fault: Fault, *, lost: str | None) -> Restart:
    return Restart(
        kind="all" if lost is None else "lost",
        cause=f"{failure.headline} {lost or ''}".rstrip(),
        step=fault.step,
        rank=failure.rank,
        task=str(task),
        checkpoint=fault.reached,
    )


def _result(folder: RunFolder, requested: Reason | None) -> dict[str, Any]:
    """Return the result that rank 0 wrote; a stop request during a resize becomes its status."""
    result = folder.read_result() or _without_result(folder, requested)
    if result.get("status") == "resized" and requested:
        result |= {"status": requested, "reason": REASONS[requested]}
        folder.write_result(result)
    return result


def _without_result(folder: RunFolder, requested: Reason | None) -> dict[str, Any]:
    """Return a minimal result for a run that was stopped before it could write one.

    Raises:
        StorageError: no stop was requested, and the result of rank 0 is missing.
    """
    if requested:
        return {"status": requested}
    Presence(folder.path).check()
    raise StorageError(
        f"all ranks ended with exit code 0, and {folder.result} is missing. {_last_checkpoint_note(folder)}"
    )


def _raise_final(failure: Failure, requested: Reason | None, folder: RunFolder) -> None:
    """Raise if a restart would fail the same way, or the run was asked to stop."""
    if failure.is_permanent:
        raise failure.error()
    if requested:
        raise stop_error(requested, str(failure.error(f"It was asked to stop. {_last_checkpoint_note(folder)}")))


def _restarting(failure: Failure, lost: str | None, reached: int, count: str) -> str:
    if lost is not None:
        return f"{failure.headline} {lost} Restarting from the checkpoint of step {reached}."
    return f"{failure.headline} Restarting from the checkpoint of step {reached} ({count} without a newer one)."


def _newest_step(folder: RunFolder) -> int | None:
    found = list_complete(folder.checkpoints) if os.path.lexists(folder.checkpoints) else []
    return found[0].step if found else None


def _last_checkpoint_note(folder: RunFolder) -> str:
    step = _newest_step(folder)
    return "There is no checkpoint." if step is None else f"The last checkpoint is that of step {step}."


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
        retry_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = [_Member(task) for task in tasks]
        self._present = list(self._members)
        self._min_replicas = min_replicas
        self._retry_s = retry_s
        self._clock = clock

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the current attempt: devices and indices as planned, ranks from 0 without gaps."""
        return tuple(replace(member.task, rank=rank) for rank, member in enumerate(self._present))

    @property
    def is_due(self) -> bool:
        """Whether a lost replica may be tried again."""
        return any(member.due is not None and member.due <= self._clock() for member in self._members)

    @property
    def at_minimum(self) -> bool:
        """Whether a further loss would leave fewer than allowed."""
        return self._min_replicas is not None and len(self._present) <= self._min_replicas

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
        return f"{len(self._present)} of {len(self._members)}"


def _name(task: Task) -> str:
    return f"{task} ({task.device})"
