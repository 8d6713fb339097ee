"""The processes of jobs: each a session of its own, that ends with this process also where that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainkit.run.process.worker_group import ProcessExit, WorkerGroup

__all__ = ["JobCommand", "JobProcess", "Starter", "start_fresh", "started_in"]


class JobProcess(Protocol):
    """A job that runs."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and its children none."""

    def kill(self) -> None:
        """End it and all its children now, and wait until they are gone; nothing where it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """What it takes to start the process of a job."""

    number: int
    """What `report` calls it, as its attempt."""
    command: Sequence[str]
    """What to start."""
    environ: Mapping[str, str]
    """What it finds there besides the environment of this process."""
    log: Path
    """Takes what it prints."""
    report: Callable[[ProcessExit], None]
    """Is told of its end, from another thread."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables of its environment, which are in no file."""

    @property
    def whole_environ(self) -> dict[str, str]:
        """All that it finds there. A job that is killed keeps what it printed."""
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environ, **self.secrets}


Starter = Callable[[JobCommand], JobProcess]
"""Starts the processes of jobs."""


def start_fresh(job: JobCommand) -> JobProcess:
    """Start an interpreter of its own for a job."""
    return started_in(WorkerGroup(job.number, job.report), job)


def started_in(group: WorkerGroup, job: JobCommand) -> JobProcess:
    """Start the process of a job as the only one of a group."""
    group.start(0, job.command, job.whole_environ, job.log)
    return group
