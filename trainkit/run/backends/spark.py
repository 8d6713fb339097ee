"""Spark: its TorchDistributor starts one worker per replica, as the tasks of one barrier stage."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from trainkit.errors import ConfigError, Problem
from trainkit.fields import placement
from trainkit.run.backends.engine import WorkerInfo, begin_attempt, may_restart, run_rank, wait_for_attempt
from trainkit.run.process_backend import BackendJob, ProcessBackend


@dataclass(frozen=True, kw_only=True)
class Spark(ProcessBackend):
    """Train on a Spark cluster, in the active session, or in a Spark session on this machine.

    Source:
    https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.torch.distributor.TorchDistributor.html
    """

    name: ClassVar[str] = "Spark"
    packages: ClassVar[tuple[str, ...]] = ("pyspark", "pandas", "pyarrow")
    extra: ClassVar[str] = "spark"

    master: Annotated[str | None, placement] = None
    """spark://HOST:PORT, yarn ...; null: the active session or that of spark-submit, else this machine's cores."""

    def require(self) -> None:
        """Check that Spark and Java are installed, and that Spark is configured for GPUs if they are needed."""
        super().require()
        require_java("cluster")

    @contextmanager
    def connect(self, *, num_ranks: int, uses_gpus: bool) -> Iterator[_Connection]:  # noqa: ARG002 - the session's
        """Use the active session, or create one, which is stopped at the end."""
        with spark_session(self.master, num_cores=num_ranks) as session:
            yield _Connection(session.conf.get("spark.driver.host"))


def require_java(key: str) -> None:
    """Check that Java, in which Spark runs, is installed.

    Raises:
        ConfigError: there is none, with the key that needs it.
    """
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and (Path(home) / "bin" / "java").exists()):
        rule = "Spark needs Java 17 or newer. Install it (Debian: default-jre-headless), or set JAVA_HOME."
        raise ConfigError([Problem(key=key, rule=rule)])


@contextmanager
def spark_session(master: str | None, *, num_cores: int) -> Iterator[Any]:
    """Yield the active session, or a new one, which is stopped at the end.

    Args:
        master: the cluster; None: that of spark-submit, which also gives the configuration, else this machine.
        num_cores: tasks that run at once on this machine.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - only where it is used

    logging.getLogger("py4j").setLevel(logging.WARNING)  # it logs every connection
    active = SparkSession.getActiveSession()
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the python3 of the path, which may lack packages
    if master is not None:
        settings["spark.master"] = master
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        keys = ("spark.driver.host", "spark.driver.bindAddress")
        settings |= {"spark.master": f"local[{num_cores}]", **dict.fromkeys(keys, "127.0.0.1")}
    session = active or SparkSession.builder.appName("trainkit").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        if active is None:
            session.stop()


@dataclass(frozen=True)
class _Connection:
    host: str

    def run(self, job: BackendJob) -> None:
        """Run one task per rank. A failure of one ends the stage; Spark does not restart it, so that is done here."""
        from pyspark.ml.torch.distributor import TorchDistributor  # noqa: PLC0415

        logger = logging.getLogger("TorchDistributor")  # without a handler it would add one
        logger.propagate, logger.handlers = False, [logging.NullHandler()]
        distributor = TorchDistributor(num_processes=job.num_ranks, local_mode=False, use_gpu=job.uses_gpus)
        for restarts_left in range(job.max_restarts, -1, -1):
            try:
                distributor.run(_in_task, dict(job.payload))
            except Exception:  # Spark may wrap the error in any class
                if not restarts_left or not may_restart(job.payload):
                    raise
            else:
                return


def _in_task(payload: Mapping[str, Any]) -> None:
    """Run a rank in a Spark task, under a torchrun of one process: its environment variables hold the rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, num_ranks, local_rank, num_local = (int(os.environ[name]) for name in names)
    info = WorkerInfo(rank=rank, num_ranks=num_ranks, local_rank=local_rank, num_local=num_local)
    key = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['MASTER_PORT']}"  # unique to each start
    attempt = begin_attempt(payload, key) if rank == 0 else wait_for_attempt(payload, key)
    run_rank(payload, info, attempt)
