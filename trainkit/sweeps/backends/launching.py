"""The launchers that pass jobs to another system: the sweep loop of `slots` with a backend."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Protocol, Self

from hydra.types import HydraContext
from omegaconf import DictConfig

from trainkit.cluster.host import num_cores
from trainkit.config.schema import hints_of
from trainkit.config.values import misfit, nearest, plain
from trainkit.errors import ConfigError, MissingExtraError, Problem
from trainkit.fields import at_least, limits_in, placement
from trainkit.files import open_regular
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.process_backend import CARRIED
from trainkit.sweeps.backends.job_spec import JobSpec, signals_file, this_process
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.launching import Launching
from trainkit.sweeps.loop import JobCommand, Slots

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy

FOLDER: Final = ".jobs"
"""The subfolder of a sweep's folder with the descriptions of its jobs."""
MANY: Final = 256
"""Jobs submitted at a time to a cluster, which queues them."""
_LOOK_S: Final = 0.2
_KILL_S: Final = 10.0
"""Time for a job to exit after SIGKILL was requested; then the backend ends it."""
_LOST: Final = 1
"""The exit code of a job that a backend lost."""


class Handle(Protocol):
    """A submitted job."""

    def ended(self) -> int | None:
        """Return the exit code of the job; None while it waits or runs. Polled.

        Raises:
            Exception: any error of the backend for a job that it lost.
        """

    def cancel(self) -> None:
        """Remove the job from the queue, or end it."""


class Submitter(Protocol):
    """A connected backend."""

    def submit(self, path: str, *, slots: int) -> Handle:
        """Submit a job: `run_described(path)`, with resources for `slots` processes.

        Args:
            path: path of the file that describes the job.
            slots: number of processes of the job.
        """


@dataclass(frozen=True, kw_only=True)
class JobBackend:
    """Base class of the backends; its fields are the keys of `hydra.launcher`."""

    packages: ClassVar[tuple[str, ...]]
    """The packages that it needs."""
    extra: ClassVar[str]
    """The extra of trainkit that installs them."""

    jobs_at_once: Annotated[int | Literal["auto"], placement, at_least(1)] = "auto"
    """Limit of processes of jobs submitted at a time; auto: one per core here, or as many as a cluster queues."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the backend with the keys of `hydra.launcher`.

        Raises:
            ConfigError: every unknown key and every value that does not fit.
        """
        hints = {key: hint for key, hint in hints_of(cls).items() if "ClassVar" not in str(hint)}
        problems = []
        for name, value in settings.items():
            key = f"hydra.launcher.{name}"
            if name not in hints:
                rule = f"no such key. {nearest(key, [f'hydra.launcher.{one}' for one in hints])}"
                problems.append(Problem(key=key, rule=rule, origin="command line"))
                continue
            wrong = misfit(value, plain(hints[name]))
            rules = [wrong] if wrong else [limit.rule for limit in limits_in(hints[name]) if limit.broken_by(value)]
            problems += [Problem(key=key, value=value, rule=rule, origin="command line") for rule in rules]
        if problems:
            raise ConfigError(problems)
        return cls(**settings)

    def require(self) -> None:
        """Check that the backend is installed.

        Raises:
            MissingExtraError: it is not installed.
        """
        for package in self.packages:
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder of that name in the current one is not a package
                raise MissingExtraError(key="hydra/launcher", package=package, extra=self.extra)

    def width(self) -> int:
        """Return the number of single-process jobs that are submitted at a time."""
        return num_cores() if self.jobs_at_once == "auto" else self.jobs_at_once

    def slots_of(self, processes: int) -> int:
        """Return the number of the `width` places that a job with `processes` processes takes."""
        return processes

    @abstractmethod
    def connect(self, folder: Path) -> AbstractContextManager[Submitter]:
        """Start the backend or connect to it; it may store files in `folder`. Leaving the block disconnects."""


@dataclass(kw_only=True)
class _RemoteJob:
    """A submitted job of a backend."""

    number: int
    path: Path
    log: Path
    handle: Handle
    report: Callable[[ProcessExit], None]
    over: threading.Event = field(default_factory=threading.Event)

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

    def look(self) -> None:
        """Report the end of the job if it has ended or is lost."""
        try:
            code = self.handle.ended()
        except Exception as error:  # noqa: BLE001 - a backend may raise any error
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(self.log, "ab") as file:
                file.write(f"{type(error).__name__}: {error}\n".encode())
            code = _LOST
        if code is not None:
            self.over.set()
            for path in (self.path, signals_file(self.path)):
                path.unlink(missing_ok=True)
            self.report(ProcessExit(attempt=self.number, rank=0, code=code))


class Remote:
    """Starts jobs with a backend, and reports their ends while the block runs.

    Args:
        submitter: the connected backend.
        folder: the folder for the descriptions of the jobs.
    """

    def __init__(self, submitter: Submitter, folder: Path) -> None:
        self._submitter, self._folder = submitter, folder
        self._jobs: list[_RemoteJob] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="jobs of the engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._closed.set()
        self._thread.join()

    def __call__(self, job: JobCommand) -> _RemoteJob:
        """Describe a job and submit it."""
        # Not the number alone: a job of a sweep that was killed may still run on another host.
        path = (self._folder / f"{int(time.time())}_{job.number}.json").absolute()
        carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
        JobSpec(
            command=tuple(job.command),
            environ={**carried, **job.environ},
            cwd=str(Path.cwd()),
            log=str(job.log),
            waiting=this_process(),
        ).write(path)
        handle = self._submitter.submit(str(path), slots=job.slots)
        remote = _RemoteJob(number=job.number, path=path, log=job.log, handle=handle, report=job.report)
        self._jobs.append(remote)
        return remote

    def _look(self) -> None:
        """Report the end of every job, once."""
        while not self._closed.wait(_LOOK_S):
            for job in self._jobs:
                if not job.over.is_set():
                    job.look()


ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "ray": ("ray_tasks", "RayTasks"),
    "spark": ("spark_tasks", "SparkTasks"),
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
        return Slots(count=self._engine.width(), key="hydra.launcher.jobs_at_once")

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source with the backend, and show the leaderboard."""
        folder = self._folder / FOLDER
        with self._engine.connect(folder) as submitter, Remote(submitter, folder) as self.sweep.start:
            super().run(source)

    def _slots_of(self, strategy: Strategy) -> int:
        return self._engine.slots_of(super()._slots_of(strategy))
