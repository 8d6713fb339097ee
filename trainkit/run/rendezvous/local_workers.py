"""The ranks of one process of an external launch, if that process runs all devices of a host.

TF_CONFIG and a cluster spec name one task per host. Such a task starts one worker per device and watches them; workers
are not restarted: a failure ends this task, and with it the others.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from trainkit.cluster.host import num_cores
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import TrainkitError
from trainkit.run.folder import fencing_token
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import ProcessEvidence, TimeLimits, Watch
from trainkit.run.planning.plan import RunPlan, plan_to_environ
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup, worker_environ
from trainkit.run.signals import Reason, StopFlag, signal_of, stop_error
from trainkit.run.supervisor.failure import Failure, hanging, is_clean, root_cause

_GRACE_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class LocalWorkerGroup:
    """The workers of this host."""

    launch: LaunchEnvironment
    plan: RunPlan
    """The plan of the run, over all hosts."""
    tasks: tuple[Task, ...]
    """The tasks of this host, with their devices."""
    store: tuple[str, int]
    prefix: str
    token: str
    """Fencing token of the run folder; a group with another token must not write."""
    limits: TimeLimits = TimeLimits()  # noqa: RUF009 - frozen
    """Longest times without progress."""

    def run(self, folder: RunFolder, peers: Callable[[], TrainkitError | None]) -> dict[str, Any] | None:
        """Start the workers and watch them until they have ended; forward Ctrl-C, SIGTERM and SIGHUP.

        `peers` returns the error of another process with which these workers have to end, if there is one.

        Returns:
            The content of result.json.

        Raises:
            TrainkitError: the first failure on this host.
        """
        events: queue.SimpleQueue[ProcessExit | Reason] = queue.SimpleQueue()
        command = [*ENTRY, str(folder.resolved)]
        folder.open_live()
        with (
            worker_group_factory(command, self.tasks) as groups,
            StopFlag(events.put) as stop,
            groups(self.launch.attempt, events.put) as group,
        ):
            for task in self.tasks:
                group.start(task.rank, command, self._environ(task), folder.log_of(task.rank) if task.rank else None)
            evidence = ProcessEvidence(folder, lambda: group.marks)
            failed = self._watch(group, events, folder, stop, evidence, peers=peers)
            if isinstance(failed, Failure):
                raise stop_error(stop.requested, failed.headline) if stop.requested else failed.error()
            if failed:
                failure = root_cause(folder, failed, group.running, evidence)
                if stop.requested and not failure.is_permanent:
                    raise stop_error(stop.requested, str(failure.error()))
                lost = failure.report is not None and failure.report.is_secondary
                raise failure.error() from (ConnectionError("a rank of another host is lost") if lost else None)
        return folder.read_result()

    def _watch(
        self,
        group: WorkerGroup,
        events: queue.SimpleQueue[ProcessExit | Reason],
        folder: RunFolder,
        stop: StopFlag,
        evidence: ProcessEvidence,
        *,
        peers: Callable[[], TrainkitError | None],
    ) -> list[ProcessExit] | Failure:
        """Wait for all to end; return the failures shortly after the first one, or a hang."""
        failed: list[ProcessExit] = []
        deadline = None
        sees_all = len(self.tasks) == len(self.plan.training_tasks)
        watch = Watch(
            self.limits,
            folder,
            sees_all=sees_all,
            pid_of=evidence.pid,
            asked_to_stop=lambda: stop.requested is not None,
        )
        while group.running and (deadline is None or time.monotonic() < deadline):
            try:
                event = events.get(timeout=min(0.2, watch.interval_s))
            except queue.Empty:
                if not failed and (error := peers()) is not None:
                    raise error from None
                overdue = None if failed else watch.look(group.running)
                if overdue is None:
                    continue
                failure = hanging(folder, overdue, group.running, evidence)
                return replace(failure, detail=group.stacks(failure.rank, folder.stacks_of(failure.rank)))
            if not isinstance(event, ProcessExit):
                group.signal(signal_of(event))
            elif not is_clean(folder, event, stopping=stop.requested is not None):
                failed.append(event)
                deadline = deadline or time.monotonic() + _GRACE_S
        while not events.empty():
            event = events.get()
            if isinstance(event, ProcessExit) and not is_clean(folder, event, stopping=stop.requested is not None):
                failed.append(event)
        return failed

    def _environ(self, task: Task) -> dict[str, str]:
        identity = Identity(
            task=task,
            num_ranks=len(self.plan.training_tasks),
            store=self.store,
            prefix=self.prefix,
            attempt=self.launch.attempt,
        )
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(self.tasks)))}
        inherited = {**plan_to_environ(self.plan), fencing_token.VARIABLE: self.token}
        return {**worker_environ({**threads, **os.environ}, identity), **inherited}
