"""The machine of this process, or the launch that its environment describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from trainkit.cluster.base import Cluster
from trainkit.cluster.detect import detect
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.fields import placement


@dataclass(frozen=True, kw_only=True)
class Local(Cluster):
    """The default: the launch in the environment, or this machine alone if there is none.

    Example:
        >>> Local(launcher="none").launch({"TF_CONFIG": "{}"}) is None
        True
    """

    launcher: Annotated[
        Literal["auto", "none", "torchrun", "environment", "tf_config", "openmpi", "mpich", "slurm", "pet"], placement
    ] = "auto"
    """The launcher; auto: the one in TRAINKIT_LAUNCHER, else the one that is found; none: ignore the environment."""

    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return the launch of this process, as found by `trainkit.cluster.detect`."""
        return detect(environ, launcher=self.launcher)
