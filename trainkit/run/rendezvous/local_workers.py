"""The ranks of one process of an external launch, if that process runs all devices of a host.

TF_CONFIG and a cluster spec name one task per host. Such a task starts one worker per device and watches them; workers
are not restarted: a failure ends this task, and with it the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from trainkit.cluster.host import num_cores
from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import TrainkitError
from trainkit.run.agent.agent import Agent, AgentSettings, Launch
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.folder import fencing_token
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan, plan_to_environ
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.process.worker_group import worker_environ
from trainkit.run.signals import stop_error


class HostLaunch(Launch):
    """The workers of one host of an external launch, for their agent.

    Args:
        folder: the run folder.
        plan: the plan of the run, over all hosts.
        tasks: the tasks of this host, with their devices.
        store: address of the store of the launch.
        prefix: prefix of its keys for this group.
        token: fencing token of the run folder; a group with another token must not write.
        peers: returns the error of another host, with which the workers of this host have to end.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: RunPlan,
        tasks: Sequence[Task],
        *,
        store: tuple[str, int],
        prefix: str,
        token: str,
        peers: Callable[[], TrainkitError | None],
    ) -> None:
        super().__init__(folder)
        self.plan, self.tasks = plan, tasks
        self._store, self._prefix, self._token, self._peers = store, prefix, token, peers

    @property
    def sees_all(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self.tasks) == len(self.plan.training_tasks)

    def identity(self, task: Task, num_ranks: int, attempt: int, life: int) -> Identity:
        """Return the identity of a rank, one of those of all hosts."""
        del num_ranks, life
        num_training = len(self.plan.training_tasks)
        return Identity(task=task, num_ranks=num_training, store=self._store, prefix=self._prefix, attempt=attempt)

    def environ(self, identity: Identity) -> dict[str, str]:
        """Return the environment of a worker: its share of the cores of this host, the plan, and the fencing token."""
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(self.tasks)))}
        inherited = {**plan_to_environ(self.plan), fencing_token.VARIABLE: self._token}
        return {**worker_environ({**threads, **os.environ}, identity), **inherited}

    def peer_error(self) -> TrainkitError | None:
        """Return the error of another host."""
        return self._peers()


def run_local_workers(launch: HostLaunch, attempt: int) -> dict[str, Any] | None:
    """Start the workers of this host and watch them until they have ended; forward Ctrl-C, SIGTERM and SIGHUP.

    Returns:
        The content of result.json.

    Raises:
        TrainkitError: the first failure on this host, or the error of another host.
    """
    folder = launch.folder
    settings = AgentSettings(max_restarts=0, limits=TimeLimits.of(launch.plan.cfg.supervisor))
    command = [*ENTRY, str(folder.resolved)]
    folder.open_live()
    with (
        worker_group_factory(command, launch.tasks) as groups,
        Agent(launch.tasks, settings, launch, command=command, groups=groups) as agent,
    ):
        failure = agent.run(attempt, launch.tasks)
        if failure is None:
            return folder.read_result()
        if agent.stop.requested and not failure.is_permanent:
            raise stop_error(agent.stop.requested, str(failure.error()))
        lost = failure.report is not None and failure.report.is_secondary
        raise failure.error() from (ConnectionError("a rank of another host is lost") if lost else None)
