"""Scripts and manifests that start a run on an engine: pure functions from a job to text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainkit.cluster.manifests.by_hand import SPEC, TF_CONFIG
from trainkit.cluster.manifests.job import ManifestJob, ManifestWriter
from trainkit.cluster.manifests.kubernetes import KUBERNETES
from trainkit.cluster.manifests.mpirun import MPIRUN
from trainkit.cluster.manifests.skypilot import SKYPILOT
from trainkit.cluster.manifests.slurm import SLURM
from trainkit.cluster.manifests.torchrun import TORCHRUN
from trainkit.cluster.manifests.vertex import VERTEX

__all__ = ["ENGINES", "ManifestJob", "ManifestWriter"]

ENGINES: Final[Mapping[str, ManifestWriter]] = {
    "torchrun": TORCHRUN,
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
    "vertex": VERTEX,
    "skypilot": SKYPILOT,
    "mpirun": MPIRUN,
    "tf_config": TF_CONFIG,
    "spec": SPEC,
}
"""Engine -> the writer of its jobs."""
