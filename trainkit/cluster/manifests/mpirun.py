"""A shell script that runs mpirun of Open MPI, one process per rank."""

from __future__ import annotations

from trainkit.cluster.manifests.job import ManifestJob


def write(job: ManifestJob) -> str:
    """Return the script of a job."""
    # Open MPI binds a rank to a core, and PyTorch's threads with it.
    flags = [f"-n {job.hosts * job.per_host}", "--bind-to none"]
    if "names" in job.options:
        names = job.options["names"].split(",")
        flags.append(f"--host {','.join(f'{name}:{job.per_host}' for name in names)}")
        if job.hosts > 1:  # the ranks meet at rank 0, whose host Open MPI does not publish
            flags.append(f"-x MASTER_ADDR={names[0]}")
    start = f"exec mpirun {' '.join(flags)} {job.shell('python', '-m', 'trainkit')}"
    return job.script([f"# {job.name} on {job.size}: bash FILE", "set -euo pipefail"], [start])
