"""The processes of jobs: each has its own session, and ends with this process even if this one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainkit.run.process.worker_group import ProcessExit, WorkerGroup


class JobProcess(Protocol):
    """A running job."""

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, but not its children."""

    def kill(self) -> None:
        """Kill the process and all its children, and wait until they are gone; no effect if it has exited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """The parameters for starting the process of a job."""

    number: int
    """The number passed to `report`, as the attempt."""
    command: Sequence[str]
    """The command to start."""
    environ: Mapping[str, str]
    """Environment variables in addition to those of this process."""
    log: Path
    """The file for the output."""
    report: Callable[[ProcessExit], None]
    """Called when the process exits, in another thread."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further environment variables, which are not in any file."""

    @property
    def whole_environ(self) -> dict[str, str]:
        """The complete environment. Output is unbuffered, so that a job that is killed keeps it."""
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environ, **self.secrets}


Starter = Callable[[JobCommand], JobProcess]
"""Starts the processes of jobs."""


def start_fresh(job: JobCommand) -> JobProcess:
    """Start a new interpreter for a job."""
    return started_in(WorkerGroup(job.number, job.report), job)


def started_in(group: WorkerGroup, job: JobCommand) -> JobProcess:
    """Start the process of a job as the only one of a group."""
    group.start(0, job.command, job.whole_environ, job.log)
    return group
