"""One machine; or, where a launcher started this process among others, those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from trainkit.cluster.base import Cluster
from trainkit.cluster.detect import detect
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.fields import placement

__all__ = ["Local"]


@dataclass(frozen=True, kw_only=True)
class Local(Cluster):
    """The default: what the environment says, and this machine alone where it says nothing.

    Example:
        >>> Local(launcher="none").launch({"TF_CONFIG": "{}"}) is None
        True
    """

    launcher: Annotated[
        Literal["auto", "none", "torchrun", "environment", "tf_config", "openmpi", "mpich", "slurm", "pet"], placement
    ] = "auto"
    """What started this process; auto: what TRAINKIT_LAUNCHER says, else what is found; none: nothing that matters."""

    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """The launch that this process belongs to, as `trainkit.cluster.detect` finds it."""
        return detect(environ, launcher=self.launcher)
