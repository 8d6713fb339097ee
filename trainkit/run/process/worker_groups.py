"""Start the ranks of a run on this host: as forks of one process (`trainkit.run.fork_server_main`), or each afresh."""

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
"""What begins the command of a worker."""


@contextmanager
def worker_group_factory(
    command: Sequence[str], tasks: Sequence[Task], *, pass_fds: Sequence[int] = ()
) -> Iterator[Callable[[int, Callable[[ProcessExit], None]], WorkerGroup]]:
    """What makes the workers of each attempt at a run: forks where that can be done and pays, else fresh interpreters.

    Args:
        command: what each rank of this host runs.
        tasks: those of this host.
        pass_fds: descriptors that every worker inherits.
    """
    if tuple(command[: len(ENTRY)]) != ENTRY or len(tasks) < 2 or not can_fork(tasks):
        yield partial(WorkerGroup, pass_fds=pass_fds)
        return
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(tasks)))}  # read as libraries are loaded
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
    """Whether ranks can be forks: where nothing but the CPU computes, since a driver of a device survives no fork."""
    return ForkServerClient.is_possible() and all(task.device == "cpu" for task in tasks)
