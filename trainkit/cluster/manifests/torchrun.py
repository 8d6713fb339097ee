"""A shell script that runs torchrun: on one host, or with the same command on each of several."""

from __future__ import annotations

from trainkit.cluster.manifests.job import ManifestJob


def write(job: ManifestJob) -> str:
    """Return the script of a job."""
    options, about, flags = job.options, [f"# {job.name} on {job.size}: bash FILE"], ["--standalone"]
    if job.hosts > 1:
        about = [
            f"# {job.name} on {job.size}: run the same line on each, bash FILE NAME.",
            "# NAME is any word; another NAME is another launch. All hosts see this folder under the same path.",
        ]
        head, port = options["head"], options.get("port", "29400")
        least = f"{options['min-hosts']}:" if "min-hosts" in options else ""
        flags = [
            f"--nnodes={least}{job.hosts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={f'[{head}]' if ':' in head else head}:{port}",
            '--rdzv-id="${1:?give the launch a NAME, the same on every host}"',
        ]
    # The agents' store ends with the first agent: a host that returns would wait for it forever.
    own_store = ["export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] if "min-hosts" in options else []
    flags.append(f"--nproc-per-node={job.per_host}")
    if "restarts" in options:
        flags.append(f"--max-restarts={options['restarts']}")
    start = f"exec torchrun {' '.join(flags)} \\\n    {job.shell('-m', 'trainkit')}"
    return job.script([*about, "set -euo pipefail"], [*own_store, start])
