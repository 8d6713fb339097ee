"""The launchers `submitit_local`, `submitit_slurm` and `ray`: the sweep loop of `slots` with a backend."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Final

from hydra.types import HydraContext
from omegaconf import DictConfig

from trainkit.config.schema import RunConfig
from trainkit.errors import Problem, UnreadableError
from trainkit.files import open_regular, read_text
from trainkit.redaction import redacted_argument
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.process_backend import CARRIED
from trainkit.sweeps.backends.base import Handle, JobBackend, Submitter
from trainkit.sweeps.backends.job_spec import Driver, JobSpec, exit_code_file, signals_file
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.launching import Launching
from trainkit.sweeps.loop.processes import JobCommand
from trainkit.sweeps.loop.slots import Slots
from trainkit.sweeps.loop.sweep import Sweep

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
    """A submitted job of a backend."""

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
        handle = self._submitter.submit(str(path), slots=self._slots_of(job.log.parent))
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


ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "ray": ("ray_tasks", "RayTasks"),
    "submitit_local": ("submitit_jobs", "SubmititLocal"),
    "submitit_slurm": ("submitit_jobs", "SubmititSlurm"),
}
"""Launcher -> module and class of its backend."""


class EngineLaunching(Launching):
    """Composes jobs and runs them with a backend, for the duration of a sweep.

    Raises:
        ConfigError: a key does not fit.
    """

    def __init__(
        self, *, hydra_context: HydraContext, config: DictConfig, launcher: str, keys: Mapping[str, Any]
    ) -> None:
        super().__init__(hydra_context=hydra_context, config=config)
        self._launcher = launcher
        module, name = ENGINES[launcher]
        kind: type[JobBackend] = getattr(import_module(f"trainkit.sweeps.backends.{module}"), name)
        self._engine = kind.of(keys)
        self._engine.require()
        self._remote = Remote(self._folder, self._slots_in)

    def _make_sweep(self) -> Sweep:
        return Sweep(
            folder=self._folder,
            slots=_Width(count=self._engine.width()),
            retries=self.settings.retries,
            on_error=self.settings.on_error,
            start=self._remote,
            command=tuple(map(redacted_argument, sys.argv[1:])),
        )

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source with the backend, and show the leaderboard."""
        with self._engine.connect(self._folder / FOLDER) as submitter, self._remote.connected(submitter):
            super().run(source)

    def _slots_of(self, cfg: RunConfig) -> int:
        return self._engine.slots_of(super()._slots_of(cfg))

    def _slots_in(self, folder: Path) -> int:
        return next((job.slots for job in self._jobs.values() if job.folder == folder), 1)


class _Width(Slots):
    """Slots for jobs whose devices another system assigns."""

    def problems(self, wanted: Iterable[tuple[str, int]]) -> list[Problem]:
        """Return problems of jobs that have more processes than are submitted at a time."""
        key = "hydra.launcher.jobs_at_once"
        return [
            Problem(
                key=key, value=self.count, rule=f"{label or 'a job'} has {count} processes. Give it {count} or more."
            )
            for label, count in dict(wanted).items()
            if count > self.count
        ]
