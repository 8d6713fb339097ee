"""The base class of the choices of the group `cluster`: how a run finds its processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from trainkit.cluster.launch import LaunchEnvironment


class Cluster(ABC):
    """Which machines take part. A choice is a frozen, keyword-only dataclass; its keys are placement."""

    starts_processes: ClassVar[bool] = False
    """Whether it starts and supervises the processes of a run itself, even for a single process."""

    @abstractmethod
    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return the launch that this process belongs to; None if it is the only one and starts what the run needs.

        This is a pure function of the config and the environment.

        Raises:
            ConfigError: every problem of the cluster or the variables.
        """
