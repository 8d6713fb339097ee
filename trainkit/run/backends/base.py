"""What an engine is: a choice of `cluster` whose own program starts the processes of a run, and starts them again.

this process       composes, checks, plans, makes and locks the run folder, holds the store where the ranks meet
the engine         starts a process a replica, wherever it has room; on a failure all of them again
each process       starts our worker, which reads `resolved.yaml` as under the supervisor
this process       shows what rank 0 prints, passes Ctrl-C on, and says what went wrong
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from trainkit.cluster.base import Cluster
from trainkit.cluster.detect import detect
from trainkit.config.values import at_least
from trainkit.errors import ConfigError, MissingExtraError, Problem
from trainkit.fields import placement

__all__ = ["CARRIED", "BackendConnection", "BackendJob", "ProcessBackend"]

CARRIED: Final = ("TRAINKIT_FAIL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
"""Variables of this process that processes on other hosts would not have."""


@dataclass(frozen=True, kw_only=True)
class BackendJob:
    """What an engine is asked to do."""

    num_ranks: int
    """Processes to start."""
    min_ranks: int | None
    """Processes that are enough where there is no room for more; None: all of them or none."""
    retry_s: float
    """Seconds between two looks for room for more."""
    max_restarts: int
    """Times that all are started again after a failure."""
    uses_gpus: bool
    """Whether each process gets a GPU."""
    cargo: Mapping[str, Any]
    """What every process is handed: `trainkit.run.backends.worker.run_rank` takes it, plain values."""
    folder: str
    """A folder that all processes see, for what the engine itself keeps."""


class BackendConnection(Protocol):
    """An engine that answers."""

    @property
    def host(self) -> str:
        """The address of this process, as the processes of the run reach it."""

    def run(self, job: BackendJob) -> None:
        """Do a job to its end, or to the failure that ends it, which is raised; may be called from any thread."""


@dataclass(frozen=True, kw_only=True)
class ProcessBackend(Cluster):
    """The base of the engines; a choice adds where its cluster is."""

    name: ClassVar[str]
    """What it is called in messages."""
    packages: ClassVar[tuple[str, ...]]
    """The packages it is made of."""
    extra: ClassVar[str]
    """The extra of trainkit's that installs them."""
    starts_processes: ClassVar[bool] = True
    elastic: ClassVar[bool] = False
    """Whether it can go on with fewer processes, and take more once there is room."""

    num_gpus: Annotated[int | Literal["auto"], placement, at_least(0)] = "auto"
    """GPUs of its cluster, a replica each; 0 trains on CPUs; auto: as many as this host has."""

    def launch(self, environ: Mapping[str, str]) -> None:
        """No launch: this process is the only one, and the engine starts the others.

        Raises:
            MissingExtraError: the engine is not installed.
            ConfigError: a launcher started this process among others, each of which would start an engine.
        """
        found = detect(environ)
        if found is not None:
            rule = f"{self.name} starts the processes, and {found.kind} started {found.num_ranks}. Start it once."
            raise ConfigError([Problem(key="cluster", rule=rule)])
        self.require()

    def require(self) -> None:
        """Make sure that the engine is there.

        Raises:
            MissingExtraError: it is not installed.
        """
        for package in self.packages:
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder of that name in the current one is no package
                raise MissingExtraError(key="cluster", package=package, extra=self.extra)

    @abstractmethod
    def connect(self, *, num_ranks: int, uses_gpus: bool) -> AbstractContextManager[BackendConnection]:
        """Start the engine on this machine, or find the one that the config names; leaving the block lets go of it."""
