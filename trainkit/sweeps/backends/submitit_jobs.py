"""submitit: jobs of SLURM, submitted as arrays; or processes of this machine, to try the same without SLURM."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, ClassVar, Final

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, placement
from trainkit.sweeps.backends.job_spec import run_described
from trainkit.sweeps.backends.launching import MANY, JobBackend

_GATHER_S: Final = 0.5
"""Jobs submitted within this time of the first form one array."""
_CANCELLED: Final = -signal.SIGKILL


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
    def connect(self, folder: Path) -> Iterator[_Executor]:
        """Connect; jobs are submitted together after a short delay, and remaining ones are cancelled at the end."""
        import submitit  # noqa: PLC0415 - only where it is used

        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns about every failing call of sacct
        made = submitit.AutoExecutor(folder=folder / "submitit", cluster=self.cluster, **self.constants())
        made.update_parameters(**self.parameters())
        with contextlib.closing(_Executor(made, gather_s=_GATHER_S if self.cluster == "slurm" else 0.0)) as executor:
            yield executor


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

    def width(self) -> int:
        """Return the largest number of jobs queued in SLURM at a time; SLURM decides when each starts."""
        return MANY if self.jobs_at_once == "auto" else self.jobs_at_once

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


class _Executor:
    """Submits jobs that arrive close together, as one array if the cluster supports arrays."""

    def __init__(self, executor: Any, *, gather_s: float) -> None:
        self._executor, self._gather_s = executor, gather_s
        self._waiting, self._begun = SimpleQueue[_SubmittedJob](), 0.0
        self._all: list[_SubmittedJob] = []

    def submit(self, path: str, *, slots: int) -> _SubmittedJob:  # noqa: ARG002 - the allocation fixes the resources
        """Queue a job for submission."""
        if self._waiting.empty():
            self._begun = time.monotonic()
        job = _SubmittedJob(path, self.submit_waiting)
        self._waiting.put(job)
        self._all.append(job)
        return job

    def submit_waiting(self) -> None:
        """Submit the queued jobs, once the first has waited for others. Called by the thread that polls the jobs."""
        if self._waiting.empty() or time.monotonic() - self._begun < self._gather_s:
            return
        jobs = [job for job in (self._waiting.get() for _ in range(self._waiting.qsize())) if job.wanted]
        try:
            found = self._executor.map_array(run_described, [job.path for job in jobs]) if jobs else []
        except Exception as error:  # noqa: BLE001 - sbatch may fail with any error
            for job in jobs:
                job.refused = error
            return
        for job, one in zip(jobs, found, strict=True):
            job.submitted = one

    def close(self) -> None:
        """Cancel the remaining jobs."""
        for job in self._all:
            if job.submitted is not None and not job.submitted.paths.result_pickle.exists():
                job.cancel()


@dataclass
class _SubmittedJob:
    path: str
    submit_waiting: Callable[[], None]
    submitted: Any = None
    wanted: bool = True
    refused: Exception | None = None

    def ended(self) -> int | None:
        """Return the exit code that the first task has left; SLURM may no longer know finished jobs."""
        self.submit_waiting()
        if self.refused is not None:
            raise self.refused
        if self.submitted is None:
            return None if self.wanted else _CANCELLED
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            if not self.submitted.done():
                return None
        return int(self.submitted.task(0).result())

    def cancel(self) -> None:
        """Remove the job from the queue, or end it."""
        self.wanted = False
        if self.submitted is not None:
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                self.submitted.cancel(check=False)
