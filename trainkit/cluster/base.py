"""What a choice of the group `cluster` is: a way to learn which processes take part in a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from trainkit.cluster.launch import LaunchEnvironment

__all__ = ["Cluster"]


class Cluster(ABC):
    """Which machines take part. A choice is a frozen, keyword-only dataclass; its keys are placement."""

    starts_processes: ClassVar[bool] = False
    """Whether it starts the processes of a run itself, be it one, and watches over them."""

    @abstractmethod
    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """The launch that this process belongs to; None: it is the only one, and starts what the run needs.

        A pure function of the config and the environment.

        Args:
            environ: `os.environ`, or what stands for it in a test.

        Raises:
            ConfigError: what is wrong with the cluster or the variables, all at once.
        """
