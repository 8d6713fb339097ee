"""A custom job for Vertex AI: a chief and workers, which read their task from TF_CONFIG and CLUSTER_SPEC."""

from __future__ import annotations

from typing import Any

from trainkit.cluster.manifests.job import SHARED, ManifestJob


def write(job: ManifestJob) -> str:
    """Return the custom job of a job."""
    # The pools are chief, workers, servers and evaluator, in this order; TF_CONFIG of each task contains its role.
    roles = job.roles or {"chief": 1, "worker": job.hosts - 1}
    start = f"gcloud ai custom-jobs create --region=REGION --display-name={job.label} --config=FILE"
    return job.manifest(start, {
        "workerPoolSpecs": [_pool(job, role, count) for role, count in roles.items() if count],
        "scheduling": {"timeout": f"{job.seconds}s"} if job.seconds else None,
    })  # fmt: skip


def _pool(job: ManifestJob, role: str, count: int) -> dict[str, Any]:
    options, gpus = job.options, job.gpus_of(role)
    server, _, path = options.get("shared", "").partition(":")
    return {
        "machineSpec": {
            "machineType": options["machine"],
            "acceleratorType": options["accelerator"] if gpus else None,
            "acceleratorCount": gpus,
        },
        "replicaCount": count,
        "containerSpec": {
            "imageUri": options["image"],
            # Vertex AI mounts NFS exports below /mnt/nfs.
            "command": job.in_container("python", "-m", "trainkit", mounted_at=f"/mnt/nfs{SHARED}"),
            "args": list(job.arguments) or None,
        },
        "nfsMounts": [{"server": server, "path": path, "mountPoint": SHARED.removeprefix("/")}] if path else None,
    }
