"""Submit jobs to a backend: one file describes a job, another holds its exit code."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Final

from trainkit.errors import UnreadableError
from trainkit.reading import open_regular, read_text
from trainkit.run.backends.base import CARRIED
from trainkit.run.process.worker_group import ProcessExit
from trainkit.sweeps.backends.base import Handle, Submitter
from trainkit.sweeps.backends.job_spec import Driver, JobSpec, exit_code_file, signals_file
from trainkit.sweeps.loop.processes import JobCommand

FOLDER: Final = ".jobs"
"""The subfolder of a sweep's folder with the descriptions of its jobs."""

_LOOK_S: Final = 0.2
_KILL_S: Final = 10.0
"""Time for a job to exit after SIGKILL was requested; then the backend ends it."""
_LATE_S: Final = 3.0
"""Time until the exit code file of an ended job must be visible: the folder may be on another host."""
_LOST: Final = 1
"""The exit code of a job that a backend lost."""


@dataclass(kw_only=True)
class _Remote:
    """A job that was submitted to a backend."""

    number: int
    path: Path
    log: Path
    handle: Handle
    report: Callable[[ProcessExit], None]
    over: threading.Event = field(default_factory=threading.Event)
    lost_at: float | None = None

    def signal(self, number: Signals) -> None:
        """Request a signal for the job, which polls for requests several times a second."""
        self._ask(number)

    def kill(self) -> None:
        """End the job now and wait; if it does not exit, the backend ends it."""
        if self.over.is_set():
            return
        self._ask(SIGKILL)
        if not self.over.wait(_KILL_S):
            self.handle.cancel()
            self.over.wait(_KILL_S)

    def _ask(self, number: Signals) -> None:
        with open_regular(signals_file(self.path), "ab") as file:
            file.write(f"{number.name}\n".encode())

    def look(self, now: float) -> int | None:
        """Return the exit code if the job has ended or is lost."""
        with contextlib.suppress(UnreadableError, ValueError):
            return int(read_text(exit_code_file(self.path), limit=32))
        why = self.handle.lost()
        if why is None:
            return None
        self.lost_at = self.lost_at or now
        if now - self.lost_at < _LATE_S:
            return None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(self.log, "ab") as file:
            file.write(f"{why}\n".encode())
        return _LOST


class Remote:
    """Starts jobs with a backend."""

    def __init__(self, folder: Path, slots_of: Callable[[Path], int]) -> None:
        self._folder, self._slots_of = folder, slots_of
        self._submitter: Submitter | None = None
        self._jobs: list[_Remote] = []

    @contextlib.contextmanager
    def connected(self, submitter: Submitter) -> Iterator[None]:
        """Use a backend while the block runs."""
        self._submitter = submitter
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,), name="jobs of the engine", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._submitter = None

    def __call__(self, job: JobCommand) -> _Remote:
        """Describe a job and submit it."""
        if self._submitter is None:
            raise RuntimeError("no backend is connected")
        # Not the number alone: a job of a sweep that was killed may still run on another host.
        path = (self._folder / FOLDER / f"{int(time.time())}_{job.number}.json").absolute()
        carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
        described = JobSpec(
            command=tuple(job.command),
            environ={**carried, **job.environ},
            cwd=str(Path.cwd()),
            log=str(job.log),
            driver=Driver.here(),
        )
        described.write(path)
        handle = self._submitter.submit(str(path), slots=self._slots_of(job.log.parent), secrets=job.secrets)
        remote = _Remote(number=job.number, path=path, log=job.log, handle=handle, report=job.report)
        self._jobs.append(remote)
        return remote

    def _look(self, ended: threading.Event) -> None:
        """Report the end of every job, once."""
        while not ended.wait(_LOOK_S):
            for job in [one for one in self._jobs if not one.over.is_set()]:
                code = job.look(time.monotonic())
                if code is not None:
                    job.over.set()
                    for file in (job.path, signals_file(job.path), exit_code_file(job.path)):
                        file.unlink(missing_ok=True)
                    job.report(ProcessExit(attempt=job.number, rank=0, code=code))
