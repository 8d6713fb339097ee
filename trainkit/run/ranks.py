"""Starting the ranks of a run on this host: as forks of one process (`trainkit.run.nursery`), or each afresh."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from trainkit.cluster.tasks import Task
from trainkit.run.environment import num_cores
from trainkit.run.forking import ForkedGroup, ForkServer
from trainkit.run.group import Exited, WorkerGroup

__all__ = ["ENTRY", "may_fork", "rank_groups"]

ENTRY: Final = (sys.executable, "-m", "trainkit.run.worker")
"""What begins the command of a worker."""


@contextmanager
def rank_groups(
    command: Sequence[str], tasks: Sequence[Task], *, pass_fds: Sequence[int] = ()
) -> Iterator[Callable[[int, Callable[[Exited], None]], WorkerGroup]]:
    """What makes the workers of each attempt at a run: forks where that can be done and pays, else fresh interpreters.

    Args:
        command: what each rank of this host runs.
        tasks: those of this host.
        pass_fds: descriptors that every worker inherits.
    """
    if tuple(command[: len(ENTRY)]) != ENTRY or len(tasks) < 2 or not may_fork(tasks):
        yield partial(WorkerGroup, pass_fds=pass_fds)
        return
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(tasks)))}  # read as libraries are loaded
    server: ForkServer | None = None
    with ExitStack() as stack:

        def group(attempt: int, report: Callable[[Exited], None]) -> WorkerGroup:
            nonlocal server
            if server is None or not server.is_alive:  # not started yet, or killed
                stack.close()
                server = stack.enter_context(
                    ForkServer(
                        "trainkit.run.nursery",
                        {**threads, **os.environ},
                        arguments=command[len(ENTRY) :],
                        pass_fds=pass_fds,
                    )
                )
            return ForkedGroup(server, ENTRY, attempt, report, pass_fds=pass_fds)

        yield group


def may_fork(tasks: Sequence[Task]) -> bool:
    """Whether ranks can be forks: where nothing but the CPU computes, since a driver of a device survives no fork."""
    return ForkServer.is_possible() and all(task.device == "cpu" for task in tasks)
