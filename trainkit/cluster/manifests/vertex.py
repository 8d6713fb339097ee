"""A custom job for Vertex AI: a chief and workers, which read their task from TF_CONFIG and CLUSTER_SPEC."""

from __future__ import annotations

from typing import Any, Final

from trainkit.cluster.manifests.job import SHARED, ManifestJob, ManifestWriter, block_yaml, linking, seconds_of

_COMPUTING: Final = ("chief", "worker")


def _write(job: ManifestJob) -> str:
    # The pools are chief, workers, servers and evaluator, in this order; TF_CONFIG of each task contains its role.
    if job.roles:
        pools = [_pool(job, number, gpus=job.gpus and role in _COMPUTING) for role, number in job.roles.items()]
    else:
        pools = [_pool(job, number, gpus=job.gpus) for number in (1, job.hosts - 1) if number]
    document: dict[str, Any] = {"workerPoolSpecs": pools}
    if "time" in job.options:
        document["scheduling"] = {"timeout": f"{seconds_of(job.options['time'])}s"}
    start = f"gcloud ai custom-jobs create --region=REGION --display-name={job.label} --config=FILE"
    return f"# {job.name} on {job.size}: {start}\n{block_yaml(document)}"


def _pool(job: ManifestJob, count: int, *, gpus: bool) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": job.options["machine"]}
    if gpus:
        machine |= {"acceleratorType": job.options["accelerator"], "acceleratorCount": job.per_host}
    # Vertex AI mounts NFS exports below /mnt/nfs.
    command = ["python", "-m", "trainkit"]
    if "shared" in job.options:
        command = ["sh", "-c", f'{linking(f"/mnt/nfs{SHARED}")}; exec "$@"', "sh", *command]
    container: dict[str, Any] = {"imageUri": job.options["image"], "command": command}
    if job.arguments:
        container["args"] = list(job.arguments)
    pool: dict[str, Any] = {"machineSpec": machine, "replicaCount": count, "containerSpec": container}
    if "shared" in job.options:
        server, _, path = job.options["shared"].partition(":")
        pool["nfsMounts"] = [{"server": server, "path": path, "mountPoint": SHARED.removeprefix("/")}]
    return pool


VERTEX: Final = ManifestWriter(
    write=_write,
    kind="TF_CONFIG",
    options=("image", "machine", "accelerator", "time", "shared"),
    needs=("image", "machine"),
    gpus_need=("accelerator",),
    hosts_need=("shared",),
    takes_devices=True,
    takes_roles=True,
    host_for_each=True,
    shares_nfs=True,
)
