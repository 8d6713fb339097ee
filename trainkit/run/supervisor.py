"""Starts the workers of a run, watches them, restarts them from the last checkpoint, and leaves nothing behind.

start all --> watch exits, heartbeats, stop signals
                all ended cleanly           --> the result
                one failed or hangs         --> name it, end the others
                    our own error           --> that error
                    no checkpoint           --> that failure
                    no further than before, max_restarts times  --> CrashLoopError
                    else                    --> start all again; they continue from the newest whole checkpoint

Tested on Linux only. macOS should do the same; Windows has no process groups to end and no pipe that tells a worker of
the supervisor's death, so a supervisor killed there leaves its workers.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.engine.manifest import scan
from trainkit.errors import CrashLoopError, StoppedError, TerminatedError, TrainkitError
from trainkit.run.environment import worker_environ
from trainkit.run.failure import Failure, culprit, hung
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited, WorkerGroup
from trainkit.run.last_words import read_last_words
from trainkit.run.rendezvous import HostedStore, Rendezvous
from trainkit.run.secrets import VARIABLE as SECRETS
from trainkit.run.stopping import EXIT_CODES, Reason, StopFlag

__all__ = ["supervise"]

_CLEAN: Final = frozenset(EXIT_CODES.values())
_GRACE_S: Final = 0.1
"""How long the others have to say their last words once one has failed."""
_GRACE_AFTER_LOSS_S: Final = 1.0
"""The same where the one only says that it lost another: who fails first may well be the last to end."""


def supervise(
    resolved: Path,
    tasks: Sequence[Task],
    *,
    folder: RunFolder,
    max_restarts: int = 3,
    hang_timeout_s: float = 600.0,
    pass_fds: Sequence[int] = (),
    secrets: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    rendezvous: Rendezvous | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the tasks of one run on this machine, each in a process of its own, to the end.

    Ctrl-C and SIGTERM are passed on as a request to save and stop; a second Ctrl-C ends everything at once. Call it
    from the main thread: signals reach no other.

    Args:
        resolved: the config file that the workers read.
        tasks: one a process; rank 0 writes the run folder, and what it prints goes to the terminal.
        folder: the run folder; its lock is held by the caller.
        max_restarts: restarts in a row that may fail to bring a newer checkpoint; 0 never restarts.
        hang_timeout_s: seconds without a heartbeat after which a rank counts as hanging.
        pass_fds: descriptors every worker inherits: the lock of the folder.
        secrets: what `resolved` does not hold, by full key; from `write_resolved`.
        command: what to start instead of `python -m trainkit.run.worker RESOLVED`; tests use it.
        rendezvous: the store the ranks meet at; by default one on the loopback interface, for this run alone.
        say: is told of restarts; by default a line on stderr.

    Returns:
        The content of `result.json`.

    Raises:
        StoppedError, TerminatedError: the run was stopped before the workers could write a result.
        CrashLoopError: restarts do not get further.
        HangError: a rank hangs, and there is no checkpoint to restart from.
        TrainkitError: what a worker raised on purpose; TrainingError for any other failure.
    """
    with ExitStack() as stack:
        meeting = rendezvous or stack.enter_context(HostedStore())
        supervisor = _Supervisor(
            tasks,
            folder=folder,
            command=command or [sys.executable, "-m", "trainkit.run.worker", str(resolved)],
            meeting=meeting,
            hang_timeout_s=hang_timeout_s,
            pass_fds=pass_fds,
            secrets=secrets or {},
        )
        supervisor.stop = stack.enter_context(StopFlag(supervisor.events.put))
        try:
            return _until_done(supervisor, folder, max_restarts=max_restarts, say=say or _say)
        except KeyboardInterrupt:
            stopped = StoppedError(f"stopped at once. {_kept(folder)}")
            _record(folder, stopped)
            raise stopped from None
        except TrainkitError as error:
            _record(folder, error)
            raise


def _record(folder: RunFolder, error: TrainkitError) -> None:
    """Leave a result, where the owner of the folder did not live to write one."""
    if folder.read_result() is None:
        status = {StoppedError: "stopped", TerminatedError: "preempted"}.get(type(error), "failed")
        found = scan(folder.checkpoints)
        last = {"last": str(found[0].folder), "steps": found[0].step} if found else {"last": None, "steps": 0}
        folder.write_result({"status": status, "reason": str(error), **last, "resume": folder.resume_command})


def _until_done(
    supervisor: _Supervisor, folder: RunFolder, *, max_restarts: int, say: Callable[[str], None]
) -> dict[str, Any]:
    best, fruitless = _newest_step(folder), 0
    for attempt in itertools.count():
        failure = supervisor.run(attempt)
        if failure is None:
            return folder.read_result() or {"status": supervisor.stop.requested or "finished"}
        if failure.final:
            raise failure.error()
        if supervisor.stop.requested:
            kind = StoppedError if supervisor.stop.requested == "stopped" else TerminatedError
            raise kind(str(failure.error(f"It was asked to stop. {_kept(folder)}")))
        reached = _newest_step(folder)
        fruitless = fruitless + 1 if reached == best else 1
        best = reached
        if max_restarts == 0 or reached is None:
            raise failure.error("" if reached is not None else "There is no checkpoint to restart from.")
        if fruitless > max_restarts:
            raise CrashLoopError(
                f"gave up after {max_restarts} restarts that got no further than the checkpoint of step {reached}: "
                f"{failure.error()}"
            )
        say(
            f"{failure.headline} Restarting from the checkpoint of step {reached} "
            f"({fruitless} of {max_restarts} without a newer one)."
        )
    raise AssertionError  # count() never ends


class _Supervisor:
    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        folder: RunFolder,
        command: Sequence[str],
        meeting: Rendezvous,
        hang_timeout_s: float,
        pass_fds: Sequence[int],
        secrets: Mapping[str, str],
    ) -> None:
        self._tasks = tasks
        self._folder = folder
        self._command = command
        self._meeting = meeting
        self._hang_timeout_s = hang_timeout_s
        self._pass_fds = pass_fds
        self._environ = {**os.environ, **({SECRETS: json.dumps(secrets)} if secrets else {})}
        self.events: queue.SimpleQueue[Exited | Reason] = queue.SimpleQueue()  # its put is safe in a signal handler
        self.stop = StopFlag()

    def run(self, attempt: int) -> Failure | None:
        """Start all workers and watch them until all have ended; returns the first failure."""
        self._folder.begin()
        self._folder.live.mkdir(parents=True)
        started = time.monotonic()
        with WorkerGroup(attempt, self.events.put, pass_fds=self._pass_fds) as group:
            for task in self._tasks:
                self._start(group, task, attempt)
            self._meeting.open()
            return self._watch(group, attempt, started)

    def _start(self, group: WorkerGroup, task: Task, attempt: int) -> None:
        identity = Identity(
            task=task,
            num_ranks=len(self._tasks),
            store=self._meeting.address,
            prefix=f"attempt/{attempt}",
            attempt=attempt,
        )
        environ = worker_environ(self._environ, identity)
        log = self._folder.log_of(task.rank) if task.rank > 0 else None
        group.start(task.rank, self._command, environ, log)

    def _watch(self, group: WorkerGroup, attempt: int, started: float) -> Failure | None:
        if self.stop.requested:  # between two attempts
            self._ask_to_stop(group, self.stop.requested)
        while group.running:
            event = self._next_event(min(1.0, self._hang_timeout_s / 4))
            if event is None:
                failure = hung(
                    self._folder,
                    group.running,
                    now=time.monotonic(),
                    started=started,
                    timeout_s=self._hang_timeout_s,
                )
                if failure is not None:
                    return self._with_stacks(group, failure)
            elif not isinstance(event, Exited):
                self._ask_to_stop(group, event)
            elif event.attempt == attempt and event.code not in _CLEAN:
                return self._diagnose(group, attempt, event)
        return self._late_failure(group, attempt)

    def _next_event(self, timeout_s: float) -> Exited | Reason | None:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _late_failure(self, group: WorkerGroup, attempt: int) -> Failure | None:
        """The exit that was reported after the last look."""
        while (event := self._next_event(0)) is not None:
            if isinstance(event, Exited) and event.attempt == attempt and event.code not in _CLEAN:
                return self._diagnose(group, attempt, event)
        return None

    def _ask_to_stop(self, group: WorkerGroup, reason: Reason) -> None:
        group.signal(signal.SIGINT if reason == "stopped" else signal.SIGTERM)

    def _diagnose(self, group: WorkerGroup, attempt: int, first: Exited) -> Failure:
        words = read_last_words(self._folder.error_of(first.rank))
        grace_s = _GRACE_AFTER_LOSS_S if words is not None and words.aftermath else _GRACE_S
        exits, deadline = [first], time.monotonic() + grace_s
        while group.running and (left := deadline - time.monotonic()) > 0:
            event = self._next_event(left)
            if isinstance(event, Exited) and event.attempt == attempt and event.code not in _CLEAN:
                exits.append(event)
        return culprit(self._folder, exits, group.running)

    def _with_stacks(self, group: WorkerGroup, failure: Failure) -> Failure:
        """Ask the hanging rank what its threads are doing; one that is stopped cannot tell."""
        if not hasattr(signal, "SIGUSR2"):
            return failure
        group.signal(signal.SIGUSR2)
        time.sleep(0.3)
        try:
            stacks = self._folder.stacks_of(failure.rank).read_text(errors="replace").strip()
        except OSError:
            stacks = ""
        detail = f"What its threads were doing:\n{stacks}" if stacks else ""
        return Failure(rank=failure.rank, headline=failure.headline, detail=detail, hang=True)


def _newest_step(folder: RunFolder) -> int | None:
    found = scan(folder.checkpoints)
    return found[0].step if found else None


def _kept(folder: RunFolder) -> str:
    step = _newest_step(folder)
    return "There is no checkpoint." if step is None else f"The last checkpoint is that of step {step}."


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal is where it is read
