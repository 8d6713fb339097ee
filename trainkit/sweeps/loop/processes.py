"""Start and stop the processes of jobs: each has its own session, and ends with this process even if this one is
killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from trainkit.errors import ConfigError, DataError, HangupError, StoppedError, TerminatedError
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.signals import is_ignored


class JobProcess(Protocol):
    """A running job."""

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, but not its children."""

    def kill(self) -> None:
        """Kill the process and all its children, and wait until they have exited; no effect if it has exited."""


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

    @property
    def whole_environ(self) -> dict[str, str]:
        """The complete environment. Output is unbuffered, so that a job that is killed keeps it."""
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environ}


Starter = Callable[[JobCommand], JobProcess]
"""Starts the processes of jobs."""


def start_fresh(job: JobCommand) -> JobProcess:
    """Start a new interpreter for a job."""
    return started_in(WorkerGroup(job.number, job.report), job)


def started_in(group: WorkerGroup, job: JobCommand) -> JobProcess:
    """Start the process of a job as the only one of a group."""
    group.start(0, job.command, job.whole_environ, job.log)
    return group


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED: Final = (
    *(kind.exit_code for kind in (StoppedError, TerminatedError, HangupError)),
    *(-number for number in _ENDING),
)
"""Exit codes of a job that was asked to stop."""
NOT_TRIED_AGAIN: Final = (0, ConfigError.exit_code, DataError.exit_code, StoppedError.exit_code, -signal.SIGINT)
"""Exit codes of jobs that are not retried: a retry would end the same way, or the user stopped the job."""


def died(code: int) -> str:
    """Return a description of how a failed job ended.

    Example:
        >>> died(1), died(-9)
        ('exit 1', 'signal 9')
    """
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def signals_to(take: Callable[[int], None]) -> Iterator[None]:
    """Forward Ctrl-C, SIGTERM and SIGHUP while the block runs, in the main thread only. A SIGHUP ignored before stays
    so.

    Args:
        take: called in a signal handler: it may only do reentrant operations, such as the put of a SimpleQueue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        take(number)

    before = {number: signal.signal(number, handle) for number in _ENDING if not is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
