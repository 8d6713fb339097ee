"""Start the ranks of a run on this host: as forks of one process (`trainkit.run.fork_server_main`), or as new
interpreters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from trainkit.cluster.tasks import Task
from trainkit.run.folder.metadata import num_cores
from trainkit.run.process.fork_client import ForkedGroup, ForkServerClient
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup

__all__ = ["ENTRY", "can_fork", "worker_group_factory"]

ENTRY: Final = (sys.executable, "-m", "trainkit.run.worker_main")
"""The beginning of a worker's command."""


@contextmanager
def worker_group_factory(
    command: Sequence[str], tasks: Sequence[Task], *, pass_fds: Sequence[int] = ()
) -> Iterator[Callable[[int, Callable[[ProcessExit], None]], WorkerGroup]]:
    """Yield the factory of worker groups for the attempts of a run: forks if possible and worthwhile, else new
    interpreters.

    Args:
        command: the command of each rank of this host.
        tasks: the tasks of this host.
        pass_fds: descriptors that every worker inherits.
    """
    if tuple(command[: len(ENTRY)]) != ENTRY or len(tasks) < 2 or not can_fork(tasks):
        yield partial(WorkerGroup, pass_fds=pass_fds)
        return
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(tasks)))}  # read when libraries are loaded
    server: ForkServerClient | None = None
    with ExitStack() as stack:

        def group(attempt: int, report: Callable[[ProcessExit], None]) -> WorkerGroup:
            nonlocal server
            if server is None or not server.is_alive:  # not started yet, or killed
                stack.close()
                server = stack.enter_context(
                    ForkServerClient(
                        "trainkit.run.fork_server_main",
                        {**threads, **os.environ},
                        arguments=command[len(ENTRY) :],
                        pass_fds=pass_fds,
                    )
                )
            return ForkedGroup(server, ENTRY, attempt, report, pass_fds=pass_fds)

        yield group


def can_fork(tasks: Sequence[Task]) -> bool:
    """Return whether ranks can be forks: only on the CPU, since a device driver does not survive a fork."""
    return ForkServerClient.is_possible() and all(task.device == "cpu" for task in tasks)
