"""Starting the ranks of a run on this host: as forks of one process (`trainkit.run.nursery`), or each afresh."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL, Signals
from types import TracebackType
from typing import Final, Self

from trainkit.cluster.tasks import Task
from trainkit.run.environment import num_cores
from trainkit.run.forking import Fork, ForkServer
from trainkit.run.group import Exited, WorkerGroup, Workers

__all__ = ["ENTRY", "ForkedGroup", "Nursery", "may_fork", "rank_groups"]

ENTRY: Final = (sys.executable, "-m", "trainkit.run.worker")
"""What begins the command of a worker."""


@contextmanager
def rank_groups(
    resolved: Path, tasks: Sequence[Task], *, pass_fds: Sequence[int] = ()
) -> Iterator[Callable[[int, Callable[[Exited], None]], Workers]]:
    """What makes the workers of each attempt at a run: forks where that can be done and pays, else fresh interpreters.

    Args:
        resolved: the config file that the ranks read.
        tasks: those of this host.
        pass_fds: descriptors that every worker inherits.
    """
    if len(tasks) < 2 or not may_fork(tasks):
        yield partial(WorkerGroup, pass_fds=pass_fds)
        return
    with Nursery(resolved, os.environ, num_ranks=len(tasks), pass_fds=pass_fds) as nursery:
        yield nursery.group


def may_fork(tasks: Sequence[Task]) -> bool:
    """Whether ranks can be forks: where nothing but the CPU computes, since a driver of a device survives no fork."""
    return ForkServer.is_possible() and all(task.device == "cpu" for task in tasks)


class Nursery:
    """Starts the ranks of a run as forks of one process, which is started with the first of them and again if it dies.

    Args:
        resolved: the config file that the ranks read.
        environ: the environment of whoever starts them.
        num_ranks: how many share the cores of this host.
        pass_fds: descriptors that every rank inherits.
    """

    def __init__(
        self, resolved: Path, environ: Mapping[str, str], *, num_ranks: int, pass_fds: Sequence[int] = ()
    ) -> None:
        self._resolved, self._pass_fds = resolved, tuple(pass_fds)
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}  # read as libraries are loaded
        self._environ = {**threads, **environ}
        self._server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def group(self, attempt: int, report: Callable[[Exited], None]) -> Workers:
        """The workers of an attempt, none of which is started yet."""
        if self._server is not None and not self._server.is_alive:
            self._end()
        if self._server is None:
            arguments, descriptors = (str(self._resolved),), self._pass_fds
            server = ForkServer("trainkit.run.nursery", self._environ, arguments=arguments, pass_fds=descriptors)
            self._server = server.__enter__()
        return ForkedGroup(self._server, attempt, report)

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.__exit__(None, None, None)


class ForkedGroup:
    """As `WorkerGroup`, of forks."""

    def __init__(self, server: ForkServer, attempt: int, report: Callable[[Exited], None]) -> None:
        self._server, self._attempt, self._report = server, attempt, report
        self._forks: dict[int, Fork] = {}

    def start(self, rank: int, command: Sequence[str], environ: Mapping[str, str], log: Path | None) -> None:
        """Start a worker; where that cannot be done, it has ended as if it had been killed.

        Args:
            rank: its number.
            command: that of a worker of its own interpreter, whose arguments it gets.
            environ: its environment.
            log: takes what it prints; None: the terminal or notebook.
        """

        def report(code: int) -> None:
            self._report(Exited(attempt=self._attempt, rank=rank, code=code, moment=time.time()))

        try:
            self._forks[rank] = self._server.fork(command[len(ENTRY) :], environ, log, report)
        except OSError:
            report(-SIGKILL)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, fork in self._forks.items() if fork.running]

    def signal(self, number: Signals) -> None:
        """Send a signal to every worker that runs, not to its children."""
        for fork in self._forks.values():
            if fork.running:
                fork.signal(number)

    def end(self, rank: int) -> None:
        """End one worker and all its children now, and wait until they are gone."""
        self._forks[rank].kill()

    def kill(self) -> None:
        """End every worker and all its children now, and wait until they are gone."""
        for fork in self._forks.values():
            fork.let_go()
        for fork in self._forks.values():
            fork.kill()

    def join(self) -> None:
        """Wait until every worker has ended, and has been reported."""
        for fork in self._forks.values():
            fork.gone.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
