"""Scripts and manifests that start a run on an engine: pure functions from a job to text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainkit.cluster.manifests import by_hand, kubernetes, mpirun, skypilot, slurm, torchrun, vertex
from trainkit.cluster.manifests.job import Engine, ManifestJob

__all__ = ["ENGINES", "Engine", "ManifestJob"]

ENGINES: Final[Mapping[str, Engine]] = {
    "torchrun": Engine(torchrun.write, "torchrun", "setup head port restarts min-hosts", hosts_need=("head",)),
    "slurm": Engine(slurm.write, "SLURM", "setup time partition account cpus-per-process", takes_roles=True),
    "kubernetes": Engine(
        kubernetes.write, "torchrun", "image namespace time shared", needs=("image",), hosts_need=("shared",),
        takes_roles=True, host_for_each=True),
    "vertex": Engine(
        vertex.write, "TF_CONFIG", "image machine accelerator time shared", needs=("image", "machine"),
        gpus_need=("accelerator",), hosts_need=("shared",), takes_devices=True, takes_roles=True, host_for_each=True),
    "skypilot": Engine(
        skypilot.write, "torchrun", "accelerator image setup shared", gpus_need=("accelerator",),
        hosts_need=("shared",)),
    "mpirun": Engine(mpirun.write, "Open MPI", "names setup", hosts_need=("names",)),
    "tf_config": Engine(by_hand.write_tf_config, "TF_CONFIG", "names port", needs=("names",), takes_roles=True),
    "spec": Engine(by_hand.write_spec, "cluster=spec", "names port", needs=("names",), takes_roles=True),
}  # fmt: skip
"""Engine -> the writer of its jobs."""
