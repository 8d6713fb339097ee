"""Start the workers of a run, watch them, restart them from the last checkpoint, and leave no process behind.

start all --> watch exits, heartbeats, stop signals
                all ended cleanly           --> the result
                one failed that is restarted alone --> report it, restart it; the others continue
                one failed or hangs         --> report it, end the others
                    trainkit's own error    --> that error
                    no checkpoint           --> that failure
                    a replica is lost       --> start the others, as long as elastic.min_replicas are left
                    the restart policy refuses (trainkit.run.agent.policy) --> CrashLoopError
                    else                    --> restart all; they continue from the newest complete checkpoint
                a lost replica is due       --> the others save and end; restart all, including that one

Tested on Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import CrashLoopError, StopKind, StoppedError, StorageError, TrainkitError
from trainkit.files import Presence, as_storage_error, refuse_unwritable
from trainkit.run.agent.agent import Agent, AgentSettings, Launch
from trainkit.run.agent.policy import ReplicaMembership, RestartPolicy, fault_of
from trainkit.run.folder.run_folder import Restart, RunFolder, record_restart
from trainkit.run.folder.run_result import RunResult, record_failure
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.process.worker_group import worker_environ
from trainkit.run.signals import stop_error
from trainkit.strategies.rendezvous_store import HostedStore, Rendezvous
from trainkit.trainer.manifest import list_complete


class LocalLaunch(Launch):
    """A run whose ranks are all on this machine, started and restarted by one agent."""

    def __init__(self, folder: RunFolder, environ: Mapping[str, str], rendezvous: Rendezvous) -> None:
        super().__init__(folder)
        self._rendezvous, self._environ, self._token = rendezvous, {**os.environ, **environ}, token_hex(32)

    def identity(self, task: Task, num_ranks: int, attempt: int, life: int) -> Identity:
        """Return the identity of a task in an attempt; each attempt has its own keys in the store."""
        return Identity(
            task=task,
            num_ranks=num_ranks,
            store=self._rendezvous.address,
            prefix=f"attempt/{attempt}",
            attempt=attempt,
            life=life,
            token=self._token,
        )

    def environ(self, identity: Identity) -> dict[str, str]:
        """Return the environment of a worker: that of this process, and its identity."""
        return worker_environ(self._environ, identity)

    def open_store(self) -> None:
        """Open the store, once the workers have been started."""
        self._rendezvous.open()


def supervise(
    resolved: Path,
    tasks: Sequence[Task],
    settings: AgentSettings = AgentSettings(),  # noqa: B008 - frozen
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
        try:
            membership = ReplicaMembership(
                tasks,
                min_replicas=settings.min_replicas,
                ranks_a_replica=settings.ranks_a_replica,
                retry_s=settings.retry_s,
            )
            groups = stack.enter_context(worker_group_factory(command, tasks, pass_fds=settings.pass_fds))
            agent = Agent(
                membership.tasks,
                settings,
                LocalLaunch(folder, settings.environ, rendezvous or stack.enter_context(HostedStore())),
                command=command,
                groups=groups,
                may_resize=lambda: membership.is_due,
            )
            stack.enter_context(agent.stop)
            return _until_done(agent, membership, folder, settings)
        except KeyboardInterrupt:
            error: TrainkitError = StoppedError(f"stopped at once. {_last_checkpoint_note(folder)}")
            cause = None
        except TrainkitError as failed:
            error, cause = failed, failed.__cause__
        except OSError as failed:  # the initial files of an attempt cannot be written
            if (refused := as_storage_error(failed, folder.path)) is None:
                raise
            error, cause = refused, failed
        with contextlib.suppress(OSError):  # the error itself is printed on the terminal
            record_failure(folder, error)
        raise error from cause


def _until_done(
    agent: Agent, membership: ReplicaMembership, folder: RunFolder, settings: AgentSettings
) -> dict[str, Any]:
    max_restarts, log = settings.max_restarts, settings.log
    best, rule, resized = _newest_step(folder), RestartPolicy(max_restarts), False
    for attempt in itertools.count():
        for line in membership.next_members():
            log(line)
            if resized:
                record_restart(folder.path, Restart(kind="returned", cause=line, checkpoint=best))
        folder.begin()
        folder.open_live()
        failure = agent.run(attempt, membership.tasks, continues_at=best)
        if failure is None:
            result = _result(folder, agent.stop.requested)
            if result.get("status") != "resized":
                return result
        else:
            requested = agent.stop.requested
            if failure.is_permanent or requested is not None:  # a restart would fail the same way, or is not wanted
                stopped = str(failure.error(f"It was asked to stop. {_last_checkpoint_note(folder)}"))
                raise failure.error() if failure.is_permanent or requested is None else stop_error(requested, stopped)
            refuse_unwritable(folder.path)
        reached, resized = _newest_step(folder), failure is None
        if reached != best:
            membership.clear_failures()
        if failure is not None:
            if max_restarts == 0 or reached is None:
                raise failure.error("" if reached is not None else settings.note_without_checkpoint)
            task = membership.tasks[failure.rank]
            fault = fault_of(folder, membership.tasks, failure.rank, begun_at=best, reached=reached)
            at_start = attempt > 0 and not agent.has_progressed(failure.rank, best)
            lost = membership.record_failure(failure.rank, at_start=at_start)
            remark = f", with elastic.min_replicas={settings.min_replicas} left" if membership.at_minimum else ""
            refusal = rule.refuse(fault, lost=lost is not None, remark=remark)
            if refusal is not None:
                raise CrashLoopError(f"{refusal}: {failure.error()}")
            cause = f"{failure.headline} {lost or ''}".rstrip()
            kind: Literal["all", "lost"] = "all" if lost is None else "lost"
            record_restart(
                folder.path,
                Restart(kind=kind, cause=cause, step=fault.step, rank=failure.rank, task=str(task), checkpoint=reached),
            )
            count = f" ({rule.no_progress} of {max_restarts} without a newer one)" if lost is None else ""
            log(f"{cause} Restarting from the checkpoint of step {reached}{count}.")
        elif reached != best:
            rule.advance()
        best = reached
    raise AssertionError  # count() never ends


def _result(folder: RunFolder, requested: StopKind | None) -> dict[str, Any]:
    """Return the result that rank 0 wrote; a stop request during a resize, or before it wrote one, becomes its status.

    Raises:
        StorageError: no stop was requested, and the result of rank 0 is missing.
    """
    if (result := folder.read_result()) is None and requested is None:
        Presence(folder.path).check()
        raise StorageError(
            f"all ranks ended with exit code 0, and {folder.result} is missing. {_last_checkpoint_note(folder)}"
        )
    stopped = RunResult.of_status(requested).content() if requested else {}
    if result is not None and result.get("status") == "resized" and requested:
        folder.write_result(result := {**result, **stopped})
    return stopped if result is None else result


def _newest_step(folder: RunFolder) -> int | None:
    checkpoints = list_complete(folder.checkpoints) if os.path.lexists(folder.checkpoints) else []
    return checkpoints[0].step if checkpoints else None


def _last_checkpoint_note(folder: RunFolder) -> str:
    step = _newest_step(folder)
    return "There is no checkpoint." if step is None else f"The last checkpoint is that of step {step}."
