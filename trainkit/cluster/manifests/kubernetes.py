"""A TrainJob for Kubernetes with Kubeflow Trainer, which configures torchrun with PET_ variables."""

from __future__ import annotations

from typing import Any, Final

from trainkit.cluster.manifests.job import SHARED, ManifestJob, ManifestWriter, block_yaml, linking, seconds_of


def _write(job: ManifestJob) -> str:
    options = job.options
    trainer: dict[str, Any] = {
        "image": options["image"],
        "numNodes": job.hosts,
        "numProcPerNode": job.per_host,
        **_command(job),
    }
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(job.per_host)}}
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": "torch-distributed",
        },
        "trainer": trainer,
    }
    if "time" in options:
        spec["activeDeadlineSeconds"] = seconds_of(options["time"])
    if "shared" in options:
        spec["runtimePatches"] = [_mount(options["shared"])]
    metadata = {"name": job.label, **({"namespace": options["namespace"]} if "namespace" in options else {})}
    document = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}
    return f"# {job.name} on {job.size}: kubectl apply -f FILE\n{block_yaml(document)}"


def _command(job: ManifestJob) -> dict[str, list[str]]:
    # Kubernetes replaces $(NAME) in commands and arguments, and reads $$ as one dollar.
    arguments = [argument.replace("$(", "$$(") for argument in job.arguments]
    command = ["torchrun", "-m", "trainkit"]
    if "shared" in job.options:
        command = ["sh", "-c", f'{linking(SHARED)}; exec "$@"', "sh", *command]
    return {"command": command, **({"args": arguments} if arguments else {})}


def _mount(claim: str) -> dict[str, Any]:
    """Return the mount of the claim that all nodes share; `node` is what torch-distributed calls job and container."""
    pod = {
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "shared", "mountPath": SHARED}]}],
    }
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": "trainkit.io/emit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


KUBERNETES: Final = ManifestWriter(
    write=_write,
    kind="torchrun",
    options=("image", "namespace", "time", "shared"),
    needs=("image",),
    hosts_need=("shared",),
)
