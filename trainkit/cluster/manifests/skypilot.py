"""A task for SkyPilot: torchrun on every node, with the addresses that SkyPilot provides."""

from __future__ import annotations

from trainkit.cluster.manifests.job import SHARED, ManifestJob, linking


def write(job: ManifestJob) -> str:
    """Return the task of a job."""
    options, group = job.options, "--standalone"
    lines = [linking(SHARED)] if "shared" in options else []
    if job.hosts > 1:
        lines.append('head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)')
        group = (
            '--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" '
            '--master-addr="$head" --master-port=29500 --rdzv-id="$SKYPILOT_TASK_ID"'
        )
    start = f"torchrun {group} --nproc-per-node={job.per_host} \\\n    {job.shell('-m', 'trainkit')}"
    resources = {
        "accelerators": f"{options['accelerator']}:{job.per_host}" if job.gpus else None,
        "image_id": f"docker:{options['image']}" if "image" in options else None,
    }
    return job.manifest("sky launch FILE", {
        "name": job.label,
        "num_nodes": job.hosts,
        "workdir": ".",
        "resources": resources if any(resources.values()) else None,
        "volumes": {SHARED: options["shared"]} if "shared" in options else None,
        "setup": f"{options['setup']}\n" if "setup" in options else None,
        "run": "\n".join([*lines, start, ""]),
    })  # fmt: skip
