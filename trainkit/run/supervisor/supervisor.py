"""Starts the workers of a run, watches them, restarts them from the last checkpoint, and leaves nothing behind.

start all --> watch exits, heartbeats, stop signals
                all ended cleanly           --> the result
                one failed that is replaced alone --> name it, start it again; the others go on
                one failed or hangs         --> name it, end the others
                    our own error           --> that error
                    no checkpoint           --> that failure
                    a replica is lost       --> start the others, as long as elastic.min_replicas are left
                    the rule of restarts is at its end (trainkit.run.supervisor.restart_policy) --> CrashLoopError
                    else                    --> start all again; they continue from the newest whole checkpoint
                a lost replica is due       --> they save and end; start all again, and that one

Tested on Linux only. macOS should do the same; Windows has no process groups to end and no pipe that tells a worker of
the supervisor's death, so a supervisor killed there leaves its workers.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainkit.cluster.tasks import Task
from trainkit.errors import CrashLoopError, StoppedError, StorageError, TrainkitError
from trainkit.run.folder.restart_record import Restart, record_restart
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.skipped import skipped_in
from trainkit.run.hang_detection.limits import TimeLimits
from trainkit.run.process.signals import REASONS, Reason, StopFlag, status_of_error, stop_error
from trainkit.run.process.worker_groups import ENTRY, worker_group_factory
from trainkit.run.rendezvous.store import HostedStore, Rendezvous
from trainkit.run.supervisor.attempts import AttemptRunner
from trainkit.run.supervisor.failure import Failure
from trainkit.run.supervisor.membership import ReplicaMembership
from trainkit.run.supervisor.restart_policy import Fault, RestartPolicy, fault_of
from trainkit.storage import Presence, as_storage_error, refuse_unwritable
from trainkit.trainer.manifest import list_complete

__all__ = ["supervise"]


def supervise(
    resolved: Path,
    tasks: Sequence[Task],
    *,
    folder: RunFolder,
    max_restarts: int = 3,
    min_replicas: int | None = None,
    retry_s: float = 60.0,
    limits: TimeLimits = TimeLimits(),  # noqa: B008 - frozen
    pass_fds: Sequence[int] = (),
    secrets: Mapping[str, Any] | None = None,
    assistants: Collection[int] = (),
    replaceable: Collection[int] = (),
    command: Sequence[str] | None = None,
    rendezvous: Rendezvous | None = None,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the tasks of one run on this machine, each in a process of its own, to the end.

    Ctrl-C, SIGTERM and SIGHUP are passed on as a request to save and stop; a second Ctrl-C ends everything at once.
    Call it from the main thread: signals reach no other.

    Args:
        resolved: the config file that the workers read.
        tasks: one a process; rank 0 writes the run folder, and what it prints goes to the terminal.
        folder: the run folder; its lock is held by the caller.
        max_restarts: bounds the restarts, as `trainkit.run.supervisor.restart_policy` says; 0 never restarts.
        min_replicas: the run goes on without replicas that are lost, as long as so many are left; None: with all.
        retry_s: seconds until a lost replica is tried again.
        limits: how long a rank may make no progress.
        pass_fds: descriptors every worker inherits: the lock of the folder.
        secrets: what `resolved` does not hold, by full key; from `write_resolved`.
        assistants: ranks that assist rank 0 and end with it.
        replaceable: ranks that are started again alone when they die, while the others go on.
        command: what to start instead of `python -m trainkit.run.worker_main RESOLVED`; tests use it.
        rendezvous: the store the ranks meet at; by default one on the loopback interface, for this run alone.
        log: receives a line for each restart and for each replica lost or tried again; default: stderr.

    Returns:
        The content of `result.json`.

    Raises:
        StoppedError, TerminatedError, HangupError: the run was stopped before the workers could write a result.
        CrashLoopError: restarts do not get further.
        HangError: a rank hangs, and there is no checkpoint to restart from.
        TrainkitError: what a worker raised on purpose; TrainingError for any other failure.
    """
    with ExitStack() as stack:
        meeting = rendezvous or stack.enter_context(HostedStore())
        roster = ReplicaMembership(tasks, min_replicas=min_replicas, retry_s=retry_s)
        command = command or [*ENTRY, str(resolved)]
        attempts = AttemptRunner(
            roster,
            folder=folder,
            command=command,
            groups=stack.enter_context(worker_group_factory(command, tasks, pass_fds=pass_fds)),
            meeting=meeting,
            limits=limits,
            secrets=secrets or {},
            assistants=assistants,
            replaceable=replaceable,
            max_restarts=max_restarts,
            log=log or _log_to_stderr,
        )
        attempts.stop = stack.enter_context(StopFlag(attempts.events.put))
        try:
            return _until_done(attempts, roster, folder, max_restarts=max_restarts, log=log or _log_to_stderr)
        except KeyboardInterrupt:
            stopped = StoppedError(f"stopped at once. {_kept(folder)}")
            _record(folder, stopped)
            raise stopped from None
        except TrainkitError as error:
            _record(folder, error)
            raise
        except OSError as error:  # what an attempt begins with cannot be written
            found = as_storage_error(error, folder.path)
            if found is None:
                raise
            _record(folder, found)
            raise found from error


def _record(folder: RunFolder, error: TrainkitError) -> None:
    """Write the cause that ends the command into the result; the owner of the folder knows only what it met itself."""
    status = status_of_error(error)
    found = list_complete(folder.checkpoints)
    last = {"last": str(found[0].folder), "steps": found[0].step} if found else {"last": None, "steps": 0}
    kept = {**last, **skipped_in(folder.checkpoints), "resume": folder.resume_command}
    with contextlib.suppress(OSError):  # the error itself is on the screen
        folder.write_result({**kept, **(folder.read_result() or {}), "status": status, "reason": str(error)})


def _until_done(
    attempts: AttemptRunner,
    roster: ReplicaMembership,
    folder: RunFolder,
    *,
    max_restarts: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    best, rule, resized = _newest_step(folder), RestartPolicy(max_restarts), False
    for attempt in itertools.count():
        for line in roster.next_members():
            log(line)
            if resized:
                record_restart(folder.path, Restart(kind="returned", cause=line, checkpoint=best))
        failure = attempts.run(attempt, continues_at=best)
        if failure is None:
            result = _result(folder, attempts.stop.requested)
            if result.get("status") != "resized":
                return result
        else:
            _raise_final(failure, attempts.stop.requested, folder)
            refuse_unwritable(folder.path)
        reached, resized = _newest_step(folder), failure is None
        if reached != best:
            roster.clear_failures()
        if failure is not None:
            if max_restarts == 0 or reached is None:
                raise failure.error("" if reached is not None else "There is no checkpoint to restart from.")
            task = roster.tasks[failure.rank]
            fault = fault_of(folder, roster.tasks, failure.rank, begun_at=best, reached=reached)
            at_start = attempt > 0 and not attempts.has_progressed(failure.rank, best)
            lost = roster.record_failure(failure.rank, at_start=at_start)
            refusal = rule.refuse(fault, lost=lost is not None, remark=_few(roster))
            if refusal is not None:
                raise CrashLoopError(f"{refusal}: {failure.error()}")
            record_restart(folder.path, _restart(failure, task, fault, lost=lost))
            log(_restarting(failure, lost, reached, f"{rule.fruitless} of {max_restarts}"))
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
    """What the owner wrote; a stop that came while the run was changing its size counts as one."""
    result = folder.read_result() or _without_result(folder, requested)
    if result.get("status") == "resized" and requested:
        result |= {"status": requested, "reason": REASONS[requested]}
        folder.write_result(result)
    return result


def _without_result(folder: RunFolder, requested: Reason | None) -> dict[str, Any]:
    """Return what a run that was asked to stop early has, which may not have come to its result.

    Raises:
        StorageError: nobody asked for a stop, and the result that the owner wrote is not there.
    """
    if requested:
        return {"status": requested}
    Presence(folder.path).check()
    raise StorageError(f"all ranks ended with exit code 0, and {folder.result} is missing. {_kept(folder)}")


def _raise_final(failure: Failure, requested: Reason | None, folder: RunFolder) -> None:
    """A restart would end the same way, or nobody wants one."""
    if failure.is_permanent:
        raise failure.error()
    if requested:
        raise stop_error(requested, str(failure.error(f"It was asked to stop. {_kept(folder)}")))


def _few(roster: ReplicaMembership) -> str:
    return f", with elastic.min_replicas={len(roster.tasks)} left" if roster.at_minimum else ""


def _restarting(failure: Failure, lost: str | None, reached: int, count: str) -> str:
    if lost is not None:
        return f"{failure.headline} {lost} Restarting from the checkpoint of step {reached}."
    return f"{failure.headline} Restarting from the checkpoint of step {reached} ({count} without a newer one)."


def _newest_step(folder: RunFolder) -> int | None:
    found = list_complete(folder.checkpoints)
    return found[0].step if found else None


def _kept(folder: RunFolder) -> str:
    step = _newest_step(folder)
    return "There is no checkpoint." if step is None else f"The last checkpoint is that of step {step}."


def _log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal is where it is read
