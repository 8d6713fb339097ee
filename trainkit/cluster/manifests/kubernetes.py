"""A TrainJob for Kubernetes with Kubeflow Trainer, which configures torchrun with PET_ variables; for tasks with roles,
Jobs of Kubernetes itself.
"""

from __future__ import annotations

from typing import Any, Final

from trainkit.cluster.manifests.job import SHARED, ManifestJob, tf_config

_PORT: Final = 2222
_START: Final = "kubectl apply -f FILE"


def write(job: ManifestJob) -> str:
    """Return the manifest of a job."""
    return job.manifest(_START, *_by_role(job)) if job.roles else job.manifest(_START, _train_job(job))


def _train_job(job: ManifestJob) -> dict[str, Any]:
    # `node` is what torch-distributed calls job and container.
    pod = _storage(job, {"name": "node"})
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "trainkit.io/emit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.label, "namespace": job.options.get("namespace")},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": job.options["image"],
                "numNodes": job.hosts,
                "numProcPerNode": job.per_host,
                **_command(job, "torchrun"),
                "resourcesPerNode": _gpus(job, "worker"),
            },
            "activeDeadlineSeconds": job.seconds,
            "runtimePatches": [patch] if "shared" in job.options else None,
        },
    }


def _command(job: ManifestJob, program: str) -> dict[str, Any]:
    # Kubernetes replaces $(NAME) in commands and arguments, and reads $$ as one dollar.
    arguments = [argument.replace("$(", "$$(") for argument in job.arguments]
    command = job.in_container(program, "-m", "trainkit", mounted_at=SHARED)
    return {"command": command, "args": arguments or None}


def _gpus(job: ManifestJob, role: str) -> dict[str, Any] | None:
    gpus = job.gpus_of(role)
    return {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else None


def _storage(job: ManifestJob, container: dict[str, Any]) -> dict[str, Any]:
    """Return container and volume of a pod that mounts the claim that all share, if there is one."""
    if (claim := job.options.get("shared")) is None:
        return {"containers": [container]}
    return {
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
        "containers": [{**container, "volumeMounts": [{"name": "shared", "mountPath": SHARED}]}],
    }


def _by_role(job: ManifestJob) -> list[dict[str, Any]]:
    """Return an indexed Job of Kubernetes itself for each role, and the headless Service that gives pods their names.

    Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    """
    selector, namespace = {"trainkit.io/run": job.label}, job.options.get("namespace")
    names = {role: f"{job.label[:48].rstrip('-')}-{role}" for role in job.roles}
    members = {
        role: [f"{names[role]}-{index}.{job.label}:{_PORT}" for index in range(number)]
        for role, number in job.roles.items()
    }
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    index = {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    documents: list[dict[str, Any]] = [{
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label, "namespace": namespace},
        # Without publishNotReadyAddresses, a pod has no name until it is ready.
        "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
    }]  # fmt: skip
    for role, number in job.roles.items():
        container = {
            "name": "trainkit",
            "image": job.options["image"],
            **_command(job, "python"),
            # Kubernetes replaces $(NAME) by the variable above it.
            "env": [index, {"name": "TF_CONFIG", "value": tf_config(members, role, "$(TASK_INDEX)")}],
            "resources": _gpus(job, role),
        }
        pod = {"subdomain": job.label, "restartPolicy": "Never", **_storage(job, container)}
        documents.append({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": names[role], "namespace": namespace, "labels": selector},
            "spec": {
                "completionMode": "Indexed",
                "completions": number,
                "parallelism": number,
                "backoffLimit": 0,
                "activeDeadlineSeconds": job.seconds,
                "template": {"metadata": {"labels": selector}, "spec": pod},
            },
        })  # fmt: skip
    return documents
