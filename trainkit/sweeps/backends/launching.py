"""The launchers `submitit_local`, `submitit_slurm` and `ray`: the sweep loop of `slots` with a backend."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TYPE_CHECKING, Any, Final, Self

from hydra.types import HydraContext
from omegaconf import DictConfig

from trainkit.errors import Problem, UnreadableError
from trainkit.files import open_regular, read_text
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.process_backend import CARRIED
from trainkit.sweeps.backends.base import Handle, JobBackend, Submitter
from trainkit.sweeps.backends.job_spec import Driver, JobSpec, exit_code_file, signals_file
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.launching import Launching
from trainkit.sweeps.loop.processes import JobCommand
from trainkit.sweeps.loop.slots import Slots

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy

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

    def kill(self) -> None:
        """End the job now and wait; if it does not exit, the backend ends it."""
        if self.over.is_set():
            return
        self.signal(SIGKILL)
        if not self.over.wait(_KILL_S):
            self.handle.cancel()
            self.over.wait(_KILL_S)

    def signal(self, number: Signals) -> None:
        """Request a signal for the job, which polls for requests several times a second."""
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
    """Starts jobs with a backend, and reports their ends while the block runs.

    Args:
        submitter: the connected backend.
        folder: the folder for the descriptions of the jobs.
        slots_of: returns the number of processes of the job in a run folder.
    """

    def __init__(self, submitter: Submitter, folder: Path, slots_of: Callable[[Path], int]) -> None:
        self._submitter, self._folder, self._slots_of = submitter, folder, slots_of
        self._jobs: list[_Remote] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="jobs of the engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._closed.set()
        self._thread.join()

    def __call__(self, job: JobCommand) -> _Remote:
        """Describe a job and submit it."""
        # Not the number alone: a job of a sweep that was killed may still run on another host.
        path = (self._folder / f"{int(time.time())}_{job.number}.json").absolute()
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

    def _look(self) -> None:
        """Report the end of every job, once."""
        while not self._closed.wait(_LOOK_S):
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

    runs_here = False

    def __init__(self, *, hydra_context: HydraContext, config: DictConfig, launcher: str, **keys: Any) -> None:
        super().__init__(hydra_context=hydra_context, config=config)
        module, name = ENGINES[launcher]
        kind: type[JobBackend] = getattr(import_module(f"trainkit.sweeps.backends.{module}"), name)
        self._engine = kind.of(keys)
        self._engine.require()

    def _make_slots(self) -> Slots:
        return _Width(count=self._engine.width())

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source with the backend, and show the leaderboard."""
        folder = self._folder / FOLDER
        with self._engine.connect(folder) as submitter, Remote(submitter, folder, self._slots_in) as self.sweep.start:
            super().run(source)

    def _slots_of(self, strategy: Strategy) -> int:
        return self._engine.slots_of(super()._slots_of(strategy))

    def _slots_in(self, folder: Path) -> int:
        return next((job.slots for job in self._jobs.values() if job.folder == folder), 1)


class _Width(Slots):
    """Slots for jobs whose devices another system assigns."""

    def problems(self, label: str, wanted: int) -> list[Problem]:
        """Return the problem of a job that has more processes than are submitted at a time."""
        rule = f"{label or 'a job'} has {wanted} processes. Give it {wanted} or more."
        problem = Problem(key="hydra.launcher.jobs_at_once", value=self.count, rule=rule)
        return [problem] if wanted > self.count else []
