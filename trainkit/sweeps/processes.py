"""The processes of jobs: each a session of its own, that ends with this process also where that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainkit.run.group import Exited, WorkerGroup

__all__ = ["JobProcess", "Starter", "start_fresh"]


class JobProcess(Protocol):
    """A job that runs."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and its children none."""

    def kill(self) -> None:
        """End it and all its children now, and wait until they are gone; nothing where it has ended."""


class Starter(Protocol):
    """Starts the processes of jobs."""

    def __call__(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        report: Callable[[Exited], None],
    ) -> JobProcess:
        """Start one.

        Args:
            number: what `report` calls it, as its attempt.
            command: what to start.
            environ: what it finds there besides the environment of this process.
            log: takes what it prints.
            report: is told of its end, from another thread.
        """


def start_fresh(
    number: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    report: Callable[[Exited], None],
) -> JobProcess:
    """Start an interpreter of its own for a job; arguments as of `Starter`."""
    group = WorkerGroup(number, report)
    # A job that is killed keeps what it printed.
    group.start(0, command, {**os.environ, "PYTHONUNBUFFERED": "1", **environ}, log)
    return group
