"""The ranks of one process of a launch, where that process stands for a host and takes all its devices.

TF_CONFIG and a cluster spec name a task a host. Such a task starts a worker a device and watches them; nobody starts
them again: a failure ends this task, and with it the others.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import Launch
from trainkit.cluster.tasks import Task
from trainkit.config.secrets import VARIABLE as SECRETS
from trainkit.errors import TrainkitError
from trainkit.run import fence
from trainkit.run.environment import num_cores, worker_environ
from trainkit.run.evidence import Evidence
from trainkit.run.failure import Failure, culprit, hanging, is_clean
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited, WorkerGroup
from trainkit.run.limits import TimeLimits
from trainkit.run.ranks import ENTRY, rank_groups
from trainkit.run.stacks import stacks_of
from trainkit.run.stopping import Reason, StopFlag, signal_of, stop_error
from trainkit.run.watching import Watch

__all__ = ["VARIABLE", "LocalRanks", "launch_from"]

VARIABLE: Final = "TRAINKIT_LAUNCH"
"""The environment variable that hands a worker the launch it belongs to, so that it plans what the others plan."""
_GRACE_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """Workers of this host to run."""

    launch: Launch
    tasks: tuple[Task, ...]
    """Those of this host, with their devices."""
    num_ranks: int
    """Ranks of the run, over all hosts."""
    store: tuple[str, int]
    prefix: str
    token: str
    """Of the fence."""
    secrets: Mapping[str, Any]
    limits: TimeLimits = TimeLimits()  # noqa: RUF009 - frozen
    """How long a rank may make no progress."""

    def run(self, folder: RunFolder) -> dict[str, Any] | None:
        """Start the workers and watch them to the end; Ctrl-C, SIGTERM and SIGHUP are passed on.

        Returns:
            The content of result.json.

        Raises:
            TrainkitError: the failure that came first on this host.
        """
        events: queue.SimpleQueue[Exited | Reason] = queue.SimpleQueue()
        command = [*ENTRY, str(folder.resolved)]
        folder.open_live()
        with (
            rank_groups(command, self.tasks) as groups,
            StopFlag(events.put) as stop,
            groups(self.launch.attempt, events.put) as group,
        ):
            for task in self.tasks:
                group.start(task.rank, command, self._environ(task), folder.log_of(task.rank) if task.rank else None)
            evidence = Evidence(folder, lambda: group.marks)
            failed = self._watch(group, events, folder, stop, evidence)
            if isinstance(failed, Failure):
                raise failed.error()
            if failed:
                failure = culprit(folder, failed, group.running, evidence)
                if stop.requested and not failure.final:
                    raise stop_error(stop.requested, str(failure.error()))
                lost = failure.words is not None and failure.words.aftermath
                raise failure.error() from (ConnectionError("a rank of another host is gone") if lost else None)
        return folder.read_result()

    def _watch(
        self,
        group: WorkerGroup,
        events: queue.SimpleQueue[Exited | Reason],
        folder: RunFolder,
        stop: StopFlag,
        evidence: Evidence,
    ) -> list[Exited] | Failure:
        """Wait for all to end; the failures, as soon as there is one and the others have had a moment, or a hang."""
        failed: list[Exited] = []
        deadline = None
        watch = Watch(self.limits, folder, sees_all=len(self.tasks) == self.num_ranks, pid_of=evidence.pid)
        while group.running and (deadline is None or time.monotonic() < deadline):
            try:
                event = events.get(timeout=min(0.2, watch.interval_s))
            except queue.Empty:
                overdue = None if failed else watch.look(group.running)
                if overdue is None:
                    continue
                failure = hanging(folder, overdue, group.running, evidence)
                return replace(failure, detail=stacks_of(group, folder, failure.rank, evidence.pid(failure.rank)))
            if not isinstance(event, Exited):
                group.signal(signal_of(event))
            elif not is_clean(folder, event, stopping=stop.requested is not None):
                failed.append(event)
                deadline = deadline or time.monotonic() + _GRACE_S
        while not events.empty():
            event = events.get()
            if isinstance(event, Exited) and not is_clean(folder, event, stopping=stop.requested is not None):
                failed.append(event)
        return failed

    def _environ(self, task: Task) -> dict[str, str]:
        identity = Identity(
            task=task,
            num_ranks=self.num_ranks,
            store=self.store,
            prefix=self.prefix,
            attempt=self.launch.attempt,
        )
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(self.tasks)))}
        handed = {VARIABLE: json.dumps(asdict(self.launch)), fence.VARIABLE: self.token}
        secrets = {SECRETS: json.dumps(dict(self.secrets))} if self.secrets else {}
        return {**worker_environ({**threads, **os.environ}, identity), **handed, **secrets}


def launch_from(environ: Mapping[str, str]) -> Launch | None:
    """The launch of a worker's host; None where no launch started it.

    Raises:
        TrainkitError: the variable holds none.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        values = json.loads(text)
        tasks = tuple(Task(**task) for task in values.pop("tasks"))
        host, port = values.pop("store")
        return Launch(**{**values, "tasks": tasks, "store": (host, port), "addresses": tuple(values["addresses"])})
    except (ValueError, TypeError, KeyError) as error:
        raise TrainkitError(f"{VARIABLE} holds no launch: {error}") from error
