"""Ray: jobs as tasks of a cluster, placed where it has resources."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainkit.fields import above, at_least, placement
from trainkit.run.backends.ray import ray_session
from trainkit.sweeps.backends.job_spec import run_described
from trainkit.sweeps.backends.launching import MANY, JobBackend


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

    def width(self) -> int:
        """Return more jobs than a cluster has room for: Ray queues them, and its autoscaler sees the demand."""
        return MANY if self.jobs_at_once == "auto" and self.address is not None else super().width()

    @contextmanager
    def connect(self, folder: Path) -> Iterator[_Cluster]:  # noqa: ARG002 - it stores nothing
        """Start Ray here, or connect to the cluster."""
        cpus = max(1, int(self.width() * self.cpus_per_process + 0.999))
        with ray_session(self.address, num_cpus=cpus) as ray:
            gpus = self.gpus_per_process
            if gpus == "auto":
                gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
            yield _Cluster(ray, self.cpus_per_process, gpus)


@dataclass(frozen=True)
class _Cluster:
    ray: Any
    cpus: float
    gpus: float

    def submit(self, path: str, *, slots: int) -> _Task:
        """Submit a job with resources for its processes; the sweep retries failed jobs, not Ray."""
        task = self.ray.remote(run_described).options(
            num_cpus=self.cpus * slots, num_gpus=self.gpus * slots, max_retries=0
        )
        return _Task(self.ray, task.remote(path))


@dataclass(frozen=True)
class _Task:
    ray: Any
    reference: Any

    def ended(self) -> int | None:
        """Return the exit code; raise the error of a task that was lost with its node."""
        done, _ = self.ray.wait([self.reference], timeout=0)
        return int(self.ray.get(self.reference)) if done else None

    def cancel(self) -> None:
        """Cancel the task by force."""
        self.ray.cancel(self.reference, force=True)
