"""A shell script that runs mpirun of Open MPI, one process per rank."""

from __future__ import annotations

from typing import Final

from trainkit.cluster.manifests.job import ManifestJob, ManifestWriter


def _write(job: ManifestJob) -> str:
    lines = ["#!/usr/bin/env bash", f"# {job.name} on {job.size}: bash FILE", "set -euo pipefail"]
    if "setup" in job.options:
        lines.append(job.options["setup"])
    # Open MPI binds a rank to a core, and PyTorch's threads with it.
    flags = [f"-n {job.hosts * job.per_host}", "--bind-to none"]
    if "names" in job.options:
        names = job.options["names"].split(",")
        flags.append(f"--host {','.join(f'{name}:{job.per_host}' for name in names)}")
        if job.hosts > 1:  # the ranks meet at rank 0, whose host Open MPI does not publish
            flags.append(f"-x MASTER_ADDR={names[0]}")
    lines.append(f"exec mpirun {' '.join(flags)} python -m trainkit {job.shell_arguments}".rstrip())
    return "\n".join([*lines, ""])


MPIRUN: Final = ManifestWriter(write=_write, kind="Open MPI", options=("names", "setup"), hosts_need=("names",))
