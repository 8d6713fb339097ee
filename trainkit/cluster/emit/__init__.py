"""Scripts and manifests that start a run on an engine: pure functions from a job to text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainkit.cluster.emit.job import Engine, Job
from trainkit.cluster.emit.kubernetes import KUBERNETES
from trainkit.cluster.emit.skypilot import SKYPILOT
from trainkit.cluster.emit.slurm import SLURM
from trainkit.cluster.emit.torchrun import TORCHRUN
from trainkit.cluster.emit.vertex import VERTEX

__all__ = ["ENGINES", "Engine", "Job"]

ENGINES: Final[Mapping[str, Engine]] = {
    "torchrun": TORCHRUN,
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
    "vertex": VERTEX,
    "skypilot": SKYPILOT,
}
"""Engine -> how its jobs are written."""
