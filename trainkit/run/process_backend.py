"""The base of process backends: choices of `cluster` whose own program starts and restarts the processes of a run.

- This process composes, checks, plans, creates and locks the run folder, and hosts the rendezvous store.
- The backend starts one process per replica where it has room, and restarts all of them after a failure.
- Each process is the agent of one worker, which reads `resolved.yaml` as under the supervisor.
- This process prints the output of rank 0, forwards Ctrl-C, and reports what went wrong.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from trainkit.cluster.base import Cluster
from trainkit.cluster.local import refuse_launched
from trainkit.errors import require_packages
from trainkit.fields import at_least, placement, unit

CARRIED: Final = ("TRAINKIT_FAIL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
"""Variables of this process that processes on other hosts would not have."""


@dataclass(frozen=True, kw_only=True)
class BackendJob:
    """The processes that a backend is asked to run."""

    num_ranks: int
    """Processes to start."""
    min_ranks: int | None
    """Smallest number of processes to start if resources are short; None: all or none."""
    retry_s: float
    """Seconds between two checks for free resources for more processes."""
    max_restarts: int
    """Number of restarts of all processes after failures."""
    uses_gpus: bool
    """Whether each process gets a GPU."""
    payload: Mapping[str, Any]
    """Argument of `trainkit.run.backends.engine.run_rank` for every process: plain values."""
    folder: str
    """A folder that all processes see, for files of the backend itself."""


class BackendConnection(Protocol):
    """A connection to a running backend."""

    @property
    def host(self) -> str:
        """The address of this process, as the processes of the run reach it."""

    def run(self, job: BackendJob) -> None:
        """Run a job until it ends; raise the failure that ends it. May be called from any thread."""


@dataclass(frozen=True, kw_only=True)
class ProcessBackend(Cluster):
    """The base class of backends; a choice adds the address of its cluster."""

    name: ClassVar[str]
    """Name of the backend in messages."""
    packages: ClassVar[tuple[str, ...]]
    """The Python packages that it needs."""
    extra: ClassVar[str]
    """The extra of trainkit that installs them."""
    starts_processes: ClassVar[bool] = True
    elastic: ClassVar[bool] = False
    """Whether it can continue with fewer processes, and add some when resources are free again."""

    num_gpus: Annotated[int | Literal["auto"], placement, at_least(0), unit("GPUs")] = "auto"
    """GPUs of the cluster, one per replica; 0 trains on CPUs; auto: as many as this host has."""

    def launch(self, environ: Mapping[str, str]) -> None:
        """Refuse an external launch: this process must be the only one, because the backend starts the others.

        Raises:
            MissingExtraError: the backend is not installed.
            ConfigError: a launcher started this process among others, each of which would start a backend.
        """
        refuse_launched(environ, f"{self.name} starts the processes")
        self.require()

    def require(self) -> None:
        """Check that the backend is installed.

        Raises:
            MissingExtraError: it is not installed.
        """
        require_packages(self.packages, key="cluster", extra=self.extra)

    @abstractmethod
    def connect(self, *, num_ranks: int, uses_gpus: bool) -> AbstractContextManager[BackendConnection]:
        """Start the backend on this machine, or connect to the one that the config names; leaving the block
        disconnects.
        """
