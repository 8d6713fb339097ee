"""A batch script for SLURM: one srun, with one task per replica."""

from __future__ import annotations

from typing import Final

from trainkit.cluster.manifests.job import ManifestJob, ManifestWriter


def _write(job: ManifestJob) -> str:
    header = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks-per-node": job.per_host,
        # All GPUs of a node are visible to each of its tasks, which takes the one of its local rank.
        "gpus-per-node": job.per_host if job.gpus else None,
        "cpus-per-task": job.options.get("cpus-per-process"),
        "time": job.options.get("time"),
        "partition": job.options.get("partition"),
        "account": job.options.get("account"),
    }
    lines = ["#!/usr/bin/env bash", f"# {job.name} on {job.size}: sbatch FILE"]
    lines += [f"#SBATCH --{name}={value}" for name, value in header.items() if value is not None]
    lines.append("set -euo pipefail")
    if "setup" in job.options:
        lines.append(job.options["setup"])
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from the job.
    cpus = f"--cpus-per-task={job.options['cpus-per-process']} " if "cpus-per-process" in job.options else ""
    # A task that fails ends the step: otherwise the others would wait for it until their timeout.
    lines.append(f"exec srun --kill-on-bad-exit=1 {cpus}python -m trainkit {job.shell_arguments}".rstrip())
    return "\n".join([*lines, ""])


SLURM: Final = ManifestWriter(
    write=_write,
    kind="SLURM",
    options=("setup", "time", "partition", "account", "cpus-per-process"),
)
