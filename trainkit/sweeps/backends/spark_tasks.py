"""Spark: jobs as tasks of its executors, one task for each job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from trainkit.fields import placement
from trainkit.run.backends.spark import require_java, spark_session
from trainkit.sweeps.backends.job_spec import run_described
from trainkit.sweeps.backends.launching import MANY, JobBackend


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

    def width(self) -> int:
        """Return more jobs than a cluster has room for: Spark queues them."""
        return MANY if self.jobs_at_once == "auto" and self.master is not None else super().width()

    @contextmanager
    def connect(self, folder: Path) -> Iterator[_Session]:  # noqa: ARG002 - it stores nothing
        """Use the active session, or create one."""
        with spark_session(self.master, num_cores=self.width()) as session, ThreadPoolExecutor(self.width()) as threads:
            yield _Session(session.sparkContext, threads)


@dataclass(frozen=True)
class _Session:
    context: Any
    threads: ThreadPoolExecutor

    def submit(self, path: str, *, slots: int) -> _Task:  # noqa: ARG002 - spark.task.cpus says what a task takes
        """Submit a job as a Spark job of one task. Spark runs the task of a lost executor once more: it continues."""
        return _Task(self.context, path, self.threads.submit(_run, self.context, path))


def _run(context: Any, path: str) -> int:
    context.setJobGroup(path, path, interruptOnCancel=True)
    (code,) = context.parallelize([path], 1).map(run_described).collect()
    return int(code)


@dataclass(frozen=True)
class _Task:
    context: Any
    group: str
    code: Future[int]

    def ended(self) -> int | None:
        """Return the exit code; raise the error with which Spark gave the task up."""
        return self.code.result() if self.code.done() else None

    def cancel(self) -> None:
        """Cancel the Spark job: its executor ends the task."""
        self.code.cancel()
        self.context.cancelJobGroup(self.group)
