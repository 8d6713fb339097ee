"""Other systems that run the jobs of a sweep: submitit (SLURM, or this machine), Ray and Spark.

The sweep loop is the same as with the launcher `slots`: it decides about retries, resumes, pruning and output. A
backend only starts jobs: it receives one module-level function and the path of a file that describes the job
(`job_spec`), and tells the exit code. `EngineLaunching` composes the jobs, `Remote` describes and submits them, and
polls the handle of each for its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from hydra.types import HydraContext
from omegaconf import DictConfig

from trainkit.cluster.host import num_cores
from trainkit.config.annotations import misfit
from trainkit.config.schema import hints_of
from trainkit.config.values import nearest
from trainkit.errors import ConfigError, Problem, require_packages
from trainkit.fields import above, at_least, placement
from trainkit.files import open_regular
from trainkit.run.backends.ray import ray_session
from trainkit.run.backends.spark import require_java, spark_session
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.process_backend import CARRIED
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.job_spec import JobSpec, run_described, signals_file, this_process
from trainkit.sweeps.launching import Launching
from trainkit.sweeps.loop import JobCommand, Slots

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy

FOLDER: Final = ".jobs"
"""The subfolder of a sweep's folder with the descriptions of its jobs."""
MANY: Final = 256
"""Jobs submitted at a time to a cluster, which queues them."""
_POLL_S: Final = 0.2
_KILL_S: Final = 10.0
"""Time for a job to exit after SIGKILL was requested; then the backend ends it."""
_LOST: Final = 1
"""The exit code of a job that a backend lost."""


class Handle(NamedTuple):
    """A submitted job."""

    ended: Callable[[], int | None]
    """Returns its exit code, None while it waits or runs; raises any error of a backend that lost it. Polled."""
    cancel: Callable[[], object]
    """Removes it from the queue, or ends it."""


Submit = Callable[[Sequence[tuple[str, int]]], Sequence[Handle]]
"""Submits `run_described(path)` for files that describe jobs, each with resources for a number of processes."""


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
                rule = f"no such key. {nearest(key, [f'hydra.launcher.{other}' for other in hints])}"
                problems.append(Problem(key=key, rule=rule, origin="command line"))
                continue
            if wrong := misfit(value, hints[name]):
                problems.append(Problem(key=key, value=value, rule=wrong, origin="command line"))
        if problems:
            raise ConfigError(problems)
        return cls(**settings)

    def require(self) -> None:
        """Check that the backend is installed.

        Raises:
            MissingExtraError: it is not installed.
        """
        require_packages(self.packages, key="hydra/launcher", extra=self.extra)

    @property
    def queues(self) -> bool:
        """Whether a cluster queues more jobs than it has room for: its scheduler sees the demand."""
        return False

    def width(self) -> int:
        """Return the number of single-process jobs that are submitted at a time."""
        if self.jobs_at_once != "auto":
            return self.jobs_at_once
        return MANY if self.queues else num_cores()

    def slots_of(self, processes: int) -> int:
        """Return the number of the `width` places that a job with `processes` processes takes."""
        return processes

    @abstractmethod
    def connect(self, folder: Path) -> AbstractContextManager[Submit]:
        """Start the backend or connect to it; it may store files in `folder`. Leaving the block disconnects."""


@dataclass(kw_only=True)
class _RemoteJob:
    """A submitted job of a backend."""

    number: int
    path: Path
    log: Path
    slots: int
    report: Callable[[ProcessExit], None]
    handle: Handle | None = None
    """None while it waits for others, with which it is submitted."""
    over: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        """End the job now and wait; if it does not exit, the backend ends it."""
        if self.handle is None and not self.over.is_set():
            self.end(-SIGKILL)
        if self.handle is None or self.over.is_set():
            return
        self.signal(SIGKILL)
        if not self.over.wait(_KILL_S):
            self.handle.cancel()
            self.over.wait(_KILL_S)

    def signal(self, number: Signals) -> None:
        """Request a signal for the job, which polls for requests several times a second."""
        with open_regular(signals_file(self.path), "ab") as file:
            file.write(f"{number.name}\n".encode())

    def poll(self) -> None:
        """Report the end of the job if it has ended or is lost."""
        try:
            code = None if self.handle is None else self.handle.ended()
        except Exception as error:  # noqa: BLE001 - a backend may raise any error
            self.lose(error)
            return
        if code is not None:
            self.end(code)

    def lose(self, error: Exception) -> None:
        """Report a job that the backend lost or refused, with the reason in its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(self.log, "ab") as file:
            file.write(f"{type(error).__name__}: {error}\n".encode())
        self.end(_LOST)

    def end(self, code: int) -> None:
        """Report the end of the job."""
        self.over.set()
        for path in (self.path, signals_file(self.path)):
            path.unlink(missing_ok=True)
        self.report(ProcessExit(attempt=self.number, rank=0, code=code))


class Remote:
    """Starts jobs with a backend, and reports their ends while the block runs.

    Jobs that arrive close together are submitted together: a cluster may take them as one array.

    Args:
        submit: submits a job to the connected backend.
        folder: the folder for the descriptions of the jobs.
    """

    def __init__(self, submit: Submit, folder: Path) -> None:
        self._submit, self._folder = submit, folder
        self._jobs: list[_RemoteJob] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="jobs of the engine", daemon=True)

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
        remote = _RemoteJob(number=job.number, path=path, log=job.log, slots=job.slots, report=job.report)
        self._jobs.append(remote)
        return remote

    def _poll(self) -> None:
        """Submit the jobs that wait, once no other has come, and report the end of every job, once."""
        last_count = 0
        while not self._closed.wait(_POLL_S):
            running = [job for job in self._jobs if not job.over.is_set()]
            waiting = [job for job in running if job.handle is None]
            if waiting and len(waiting) == last_count:
                try:
                    handles = self._submit([(str(job.path), job.slots) for job in waiting])
                except Exception as error:  # noqa: BLE001 - sbatch may fail with any error
                    for job in waiting:
                        job.lose(error)
                    continue
                for job, handle in zip(waiting, handles, strict=True):
                    job.handle = handle
                    if job.over.is_set():  # killed meanwhile
                        handle.cancel()
            last_count = len(waiting)
            for job in running:
                if not job.over.is_set():
                    job.poll()


@dataclass(frozen=True, kw_only=True)
class RayTasks(JobBackend):
    """Run jobs on a Ray cluster, or on a Ray instance started on this machine for the sweep.

    Source: https://docs.ray.io/en/latest/ray-core/tasks.html
    """

    packages: ClassVar[tuple[str, ...]] = ("ray",)
    extra: ClassVar[str] = "ray"

    address: Annotated[str | None, placement] = None
    """The cluster: HOST:PORT, or auto for the one that this host is part of; null starts Ray here, for this sweep."""
    cpus_per_process: Annotated[float, placement, above(0)] = 1.0
    """Cores that Ray reserves for each process of a job."""
    gpus_per_process: Annotated[float | Literal["auto"], placement, at_least(0)] = "auto"
    """GPUs for each process; less than 1 shares a GPU; auto: one where this host has GPUs."""

    @property
    def queues(self) -> bool:
        """Whether it connects to a cluster, whose autoscaler sees the demand."""
        return self.address is not None

    @contextmanager
    def connect(self, folder: Path) -> Iterator[Submit]:  # noqa: ARG002 - it stores nothing
        """Start Ray here, or connect to the cluster."""
        with ray_session(self.address, num_cpus=max(1, math.ceil(self.width() * self.cpus_per_process))) as ray:
            gpus = self.gpus_per_process
            if gpus == "auto":
                gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
            run = ray.remote(run_described)

            def submit(path: str, slots: int) -> Handle:
                resources = {"num_cpus": self.cpus_per_process * slots, "num_gpus": gpus * slots}
                task = run.options(**resources, max_retries=0).remote(path)  # the sweep retries failed jobs, not Ray
                return Handle(partial(_code_of, task.future()), partial(ray.cancel, task, force=True))

            yield lambda jobs: [submit(*job) for job in jobs]


def _code_of(future: Future[int]) -> int | None:
    """Return the exit code of a job; raise the error with which its backend gave it up."""
    return int(future.result()) if future.done() else None


@dataclass(frozen=True, kw_only=True)
class SparkTasks(JobBackend):
    """Run jobs on the executors of Spark: of the active session, of a cluster, or of a Spark started here.

    Source: https://spark.apache.org/docs/latest/job-scheduling.html
    """

    packages: ClassVar[tuple[str, ...]] = ("pyspark",)
    extra: ClassVar[str] = "spark"

    master: Annotated[str | None, placement] = None
    """spark://HOST:PORT, yarn ...; null: the active session or that of spark-submit, else this machine's cores."""

    def require(self) -> None:
        """Check that Spark and Java are installed."""
        super().require()
        require_java("hydra/launcher")

    @property
    def queues(self) -> bool:
        """Whether it connects to a cluster."""
        return self.master is not None

    @contextmanager
    def connect(self, folder: Path) -> Iterator[Submit]:  # noqa: ARG002 - it stores nothing
        """Use the active session, or create one. Spark runs the task of a lost executor once more: it continues."""
        with spark_session(self.master, num_cores=self.width()) as session, ThreadPoolExecutor(self.width()) as threads:
            context = session.sparkContext

            def run(path: str) -> int:
                context.setJobGroup(path, path, interruptOnCancel=True)
                (code,) = context.parallelize([path], 1).map(run_described).collect()
                return int(code)

            def submit(path: str) -> Handle:
                future = threads.submit(run, path)

                def cancel() -> None:
                    future.cancel()
                    context.cancelJobGroup(path)  # its executor ends the task

                return Handle(partial(_code_of, future), cancel)

            yield lambda jobs: [submit(path) for path, _ in jobs]  # spark.task.cpus says what a task takes


@dataclass(frozen=True, kw_only=True)
class SubmititLocal(JobBackend):
    """Run jobs through submitit on this machine.

    Source: https://github.com/facebookincubator/submitit
    """

    packages: ClassVar[tuple[str, ...]] = ("submitit",)
    extra: ClassVar[str] = "slurm"
    cluster: ClassVar[str] = "local"

    timeout_min: Annotated[int, placement, at_least(1)] = 1440
    """Time limit of a job in minutes."""

    def parameters(self) -> dict[str, Any]:
        """Return submitit's parameters of a job."""
        return {"timeout_min": self.timeout_min}

    def constants(self) -> dict[str, Any]:
        """Return submitit's parameters of the executor."""
        return {}

    @contextmanager
    def connect(self, folder: Path) -> Iterator[Submit]:
        """Connect; remaining jobs are cancelled at the end."""
        import submitit  # noqa: PLC0415 - only where it is used

        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns about every failing call of sacct
        executor = submitit.AutoExecutor(folder=folder / "submitit", cluster=self.cluster, **self.constants())
        executor.update_parameters(**self.parameters())
        submitted: list[Any] = []

        def submit(jobs: Sequence[tuple[str, int]]) -> list[Handle]:  # the allocation fixes the resources
            submissions = executor.map_array(run_described, [path for path, _ in jobs])
            submitted.extend(submissions)
            return [Handle(partial(_exit_code_of, job), partial(_cancel, job)) for job in submissions]

        try:
            yield submit
        finally:
            for job in submitted:
                if not job.paths.result_pickle.exists():
                    _cancel(job)


def _exit_code_of(job: Any) -> int | None:
    """Return the exit code that the first task has left; SLURM may no longer know finished jobs."""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        if not job.done():
            return None
    return int(job.task(0).result())


def _cancel(job: Any) -> None:
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        job.cancel(check=False)


@dataclass(frozen=True, kw_only=True)
class SubmititSlurm(SubmititLocal):
    """Run jobs as arrays of SLURM, one task per node; a job that is preempted or out of time saves and is requeued.

    Source: https://github.com/facebookincubator/submitit/blob/main/docs/checkpointing.md
    """

    cluster: ClassVar[str] = "slurm"

    partition: Annotated[str | None, placement] = None
    """The partition in which jobs are queued; null: SLURM's default."""
    nodes: Annotated[int, placement, at_least(1)] = 1
    """Nodes of a job; more than one is for strategy=multi_worker_mirrored."""
    tasks_per_node: Annotated[int, placement, at_least(1)] = 1
    """Processes that SLURM starts on each node; with one, it starts the other processes of its node itself."""
    gpus_per_node: Annotated[int, placement, at_least(0)] = 0
    """GPUs of a job on each of its nodes."""
    cpus_per_task: Annotated[int | None, placement, at_least(1)] = None
    """Cores of each task; null: SLURM's default."""
    mem_gb: Annotated[float | None, placement, at_least(0)] = None
    """Memory of each node; null: SLURM's default."""
    save_s: Annotated[int, placement, at_least(1)] = 90
    """Seconds before the time limit at which a job is asked to save."""
    max_requeues: Annotated[int, placement, at_least(0)] = 3
    """Number of times that a job is requeued at its time limit; a preempted job always is."""
    additional: Annotated[dict[str, Any], placement] = field(default_factory=dict)
    """Further options of sbatch by their long names, {account: lab, qos: low}."""

    @property
    def queues(self) -> bool:
        """True: SLURM decides when each job starts."""
        return True

    def slots_of(self, processes: int) -> int:  # noqa: ARG002 - the processes share its allocation
        """Return 1: a job takes one place, for any number of processes."""
        return 1

    def require(self) -> None:
        """Check that submitit and SLURM's commands are installed."""
        super().require()
        if shutil.which("sbatch") is None:
            rule = "needs SLURM's commands, and there is no sbatch here. Start it there, or use submitit_local."
            raise ConfigError([Problem(key="hydra/launcher", value="submitit_slurm", rule=rule)])

    def parameters(self) -> dict[str, Any]:
        """Return submitit's parameters of a job."""
        parameters = {
            "slurm_partition": self.partition,
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus_per_task,
            "mem_gb": self.mem_gb,
            "slurm_additional_parameters": self.additional or None,
        }
        return {
            **super().parameters(),
            "name": "trainkit",
            "nodes": self.nodes,
            "tasks_per_node": self.tasks_per_node,
            "slurm_array_parallelism": self.width(),
            "slurm_signal_delay_s": self.save_s,
            **{name: value for name, value in parameters.items() if value is not None},
        }

    def constants(self) -> dict[str, Any]:
        """Return submitit's limit of requeues after the time limit."""
        return {"slurm_max_num_timeout": self.max_requeues}


ENGINES: Final[Mapping[str, type[JobBackend]]] = {
    "ray": RayTasks,
    "spark": SparkTasks,
    "submitit_local": SubmititLocal,
    "submitit_slurm": SubmititSlurm,
}
"""Launcher -> its backend."""


class EngineLaunching(Launching):
    """Composes jobs and runs them with a backend, for the duration of a sweep.

    Raises:
        ConfigError: a key does not fit.
    """

    runs_here = False

    def __init__(self, *, hydra_context: HydraContext, config: DictConfig, launcher: str, **keys: Any) -> None:
        super().__init__(hydra_context=hydra_context, config=config)
        self._engine = ENGINES[launcher].of(keys)
        self._engine.require()

    def _make_slots(self) -> Slots:
        return Slots(count=self._engine.width(), key="hydra.launcher.jobs_at_once")

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source with the backend, and show the leaderboard."""
        folder = self._folder / FOLDER
        with self._engine.connect(folder) as submit, Remote(submit, folder) as self.sweep.start:
            super().run(source)

    def _slots_of(self, strategy: Strategy) -> int:
        return self._engine.slots_of(super()._slots_of(strategy))
