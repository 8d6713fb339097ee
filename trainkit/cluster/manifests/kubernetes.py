"""A TrainJob for Kubernetes with Kubeflow Trainer, which configures torchrun with PET_ variables; for tasks with roles,
Jobs of Kubernetes itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainkit.cluster.manifests.job import (
    SHARED,
    ManifestJob,
    ManifestWriter,
    block_yaml,
    linking,
    seconds_of,
    tf_config,
)

_PORT: Final = 2222


def _write(job: ManifestJob) -> str:
    return _jobs_by_role(job) if job.roles else _train_job(job)


def _train_job(job: ManifestJob) -> str:
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


def _jobs_by_role(job: ManifestJob) -> str:
    """Return an indexed Job of Kubernetes itself for each role, and the headless Service that gives pods their names.

    Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    """
    metadata = {"namespace": job.options["namespace"]} if "namespace" in job.options else {}
    selector = {"trainkit.io/run": job.label}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label, **metadata},
        # Without publishNotReadyAddresses, a pod has no name until it is ready.
        "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
    }
    names = {role: f"{job.label[:48].rstrip('-')}-{role}" for role in job.roles}
    members = {
        role: [f"{names[role]}-{index}.{job.label}:{_PORT}" for index in range(number)]
        for role, number in job.roles.items()
    }
    documents: list[dict[str, Any]] = [service]
    for role, number in job.roles.items():
        spec: dict[str, Any] = {"completionMode": "Indexed", "completions": number, "parallelism": number}
        spec["backoffLimit"] = 0
        if "time" in job.options:
            spec["activeDeadlineSeconds"] = seconds_of(job.options["time"])
        spec["template"] = {"metadata": {"labels": selector}, "spec": _pod(job, role, members)}
        head = {"name": names[role], **metadata, "labels": selector}
        documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": spec})
    text = "---\n".join(block_yaml(document) for document in documents)
    return f"# {job.name} on {job.size}: kubectl apply -f FILE\n{text}"


def _pod(job: ManifestJob, role: str, members: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    index = {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    # Kubernetes replaces $(NAME) by the variable above.
    variable = {"name": "TF_CONFIG", "value": tf_config(members, role, "$(TASK_INDEX)")}
    command = _command(job)
    command["command"] = [word for word in command["command"] if word not in ("torchrun", "-m", "trainkit")]
    container: dict[str, Any] = {
        "name": "trainkit",
        "image": job.options["image"],
        "command": [*command["command"], "python", "-m", "trainkit"],
        **({"args": command["args"]} if "args" in command else {}),
        "env": [index, variable],
    }
    if job.gpus and role in ("chief", "worker"):
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.per_host)}}
    pod: dict[str, Any] = {"subdomain": job.label, "restartPolicy": "Never", "containers": [container]}
    if "shared" in job.options:
        container["volumeMounts"] = [{"name": "shared", "mountPath": SHARED}]
        pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": job.options["shared"]}}]
    return pod


KUBERNETES: Final = ManifestWriter(
    write=_write,
    kind="torchrun",
    options=("image", "namespace", "time", "shared"),
    needs=("image",),
    hosts_need=("shared",),
    takes_roles=True,
    host_for_each=True,
)
