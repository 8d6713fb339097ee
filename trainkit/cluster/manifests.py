"""Scripts and manifests that start a run on an engine: for each engine a pure function from a job to text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.launchers import TASKS
from trainkit.cluster.members import ROLES, Members
from trainkit.cluster.tasks import Task

_SHARED: Final = "/shared"
"""The path in a container of the file system that all hosts share."""
_UNITS: Final = (1, 60, 3600, 24 * 3600)
"""Seconds of the parts of a duration, from its end."""
_PORT: Final = 2222
"""The first port of a host: TensorFlow's."""


@dataclass(frozen=True, kw_only=True)
class ManifestJob:
    """A run that an engine starts.

    Example:
        >>> job = ManifestJob(name="digits", arguments=("epochs=3",), hosts=2, per_host=4, gpus=True)
        >>> job.size
        '2 hosts of 4 GPUs'
    """

    name: str
    """The run's name."""
    arguments: tuple[str, ...]
    """The arguments of trainkit, unquoted."""
    hosts: int
    """Number of identical hosts."""
    per_host: int
    """Number of processes per host, a replica each."""
    gpus: bool
    """Whether each process takes a GPU."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's own flags, by name without dashes."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role -> number of its tasks, for a strategy with other roles than worker; empty: every process is a worker."""

    @property
    def size(self) -> str:
        """The hosts and their processes, in words."""
        if self.roles:
            return ", ".join(f"{number} {role}" for role, number in self.roles.items())
        hosts = "a host" if self.hosts == 1 else f"{self.hosts} hosts"
        singular, plural = ("GPU", "GPUs") if self.gpus else ("process", "processes")
        return f"{hosts} of {self.per_host} {singular if self.per_host == 1 else plural}"

    @property
    def seconds(self) -> int | None:
        """The time limit `[DAYS-]HH:MM:SS` in seconds; None without one.

        Example:
            >>> limit = {"time": "1-02:00:30"}
            >>> job = ManifestJob(name="a", arguments=(), hosts=1, per_host=1, gpus=False, options=limit)
            >>> job.seconds
            93630
        """
        parts = re.split("[-:]", self.options.get("time", "0"))
        return sum(int(part) * unit for part, unit in zip(reversed(parts), _UNITS, strict=False)) or None

    @property
    def label(self) -> str:
        """The name in the form of Kubernetes and clouds: lower case, digits and dashes, a letter first, 63 characters
        at most.

        Example:
            >>> ManifestJob(name="My_run.2", arguments=(), hosts=1, per_host=1, gpus=False).label
            'my-run-2'
        """
        text = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (text if text[:1].isalpha() else f"run-{text}".rstrip("-"))[:63].rstrip("-")

    def gpus_of(self, role: str) -> int | None:
        """Return the number of GPUs of a task that is alone on its host; None without any."""
        return self.per_host if self.gpus and role in ("chief", "worker") else None

    def tasks(self) -> list[tuple[str, int]]:
        """Return role and index of every task, in the order of the ranks.

        Example:
            >>> job = ManifestJob(name="a", arguments=(), hosts=1, per_host=1, gpus=False, roles={"ps": 1, "chief": 1})
            >>> job.tasks()
            [('chief', 0), ('ps', 0)]
        """
        counts = self.roles or {"worker": self.hosts * self.per_host}
        return [(role, index) for role in ROLES for index in range(counts.get(role, 0))]

    def shell(self, *program: str) -> str:
        """Return a command with the arguments, quoted for a shell."""
        return shlex.join([*program, *self.arguments])

    def in_container(self, *program: str, mounted_at: str) -> list[str]:
        """Return the command of a container, which links its outputs into the shared file system, if it has one."""
        link = ["sh", "-c", f'{_linking(mounted_at)}; exec "$@"', "sh"] if "shared" in self.options else []
        return [*link, *program]

    def script(self, start: str, head: Sequence[str], lines: Sequence[str]) -> str:
        """Return a script of bash that runs `--setup` between its head and its other lines."""
        setup = [self.options["setup"]] if "setup" in self.options else []
        about = f"# {self.name} on {self.size}: {start}"
        return "\n".join(["#!/usr/bin/env bash", about, *head, "set -euo pipefail", *setup, *lines, ""])

    def manifest(self, start: str, *documents: Mapping[str, Any]) -> str:
        """Return documents as YAML, without the keys whose value is None, below the command that starts them."""
        return f"# {self.name} on {self.size}: {start}\n{_yaml([_without_none(document) for document in documents])}"

    def launch(self, *, kind: str, takes_devices: bool) -> LaunchEnvironment | None:
        """Return the launch of one process, with the fields that a strategy checks; None for a single process."""
        tasks = workers(self.hosts if takes_devices else self.hosts * self.per_host)
        if self.roles:
            tasks = tuple(Task(role=role, index=index, rank=rank) for rank, (role, index) in enumerate(self.tasks()))
        if len(tasks) == 1:
            return None
        num_local = -(-len(tasks) // self.hosts)
        return LaunchEnvironment(
            kind=kind,
            tasks=tasks,
            rank=0,
            local_rank=0,
            num_local=num_local,
            num_hosts=self.hosts,
            store=("127.0.0.1", 0),
            takes_devices=num_local == 1 if self.roles else takes_devices,
            names_roles=bool(self.roles),
        )


def _linking(mount_point: str) -> str:
    """Return the line of shell that links a container's outputs into a shared file system, if there are none yet."""
    return f"[ -e outputs ] || ln -s {shlex.quote(mount_point)} outputs"


def _without_none(node: Any) -> Any:
    """Return a document without the keys whose value is None."""
    if isinstance(node, Mapping):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return [_without_none(item) for item in node] if isinstance(node, list) else node


def _yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML with keys in the given order, and texts of several lines as blocks."""
    import yaml  # noqa: PLC0415 - only an engine that takes YAML needs it

    class Dumper(yaml.SafeDumper):
        """One of its own: the representer is not for other documents."""

        def represent_text(self, text: str) -> yaml.ScalarNode:
            """Return the node of a text."""
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=4096, allow_unicode=True)


def _tf_config(members: Members, role: str, index: int | str) -> str:
    """Return the content of TF_CONFIG for one task.

    Source: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
    """
    cluster = {name: list(texts) for name, texts in members.items()}
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def _torchrun(job: ManifestJob) -> str:
    """Return a script for one host, or for each of several the same one, started with the same name."""
    options, start, about, flags = job.options, "bash FILE", list[str](), ["--standalone"]
    if job.hosts > 1:
        start = "run the same line on each, bash FILE NAME."
        about = ["# NAME is any word; another NAME is another launch. All hosts see this folder under the same path."]
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
    flags += [f"--max-restarts={options['restarts']}"] if "restarts" in options else []
    command = f"exec torchrun {' '.join(flags)} \\\n    {job.shell('-m', 'trainkit')}"
    return job.script(start, about, [*own_store, command])


def _slurm(job: ManifestJob) -> str:
    """Return a batch script with one srun; tasks with roles are in turn over the nodes."""
    total, options = sum(job.roles.values()), job.options
    header = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks-per-node": -(-total // job.hosts) or job.per_host,
        # All GPUs of a node are visible to each of its tasks, which takes the one of its local rank.
        "gpus-per-node": job.per_host if job.gpus else None,
        "cpus-per-task": options.get("cpus-per-process"),
        **{name: options.get(name) for name in ("time", "partition", "account")},
    }
    head = [f"#SBATCH --{name}={value}" for name, value in header.items() if value is not None]
    # A task that fails ends the step: otherwise the others would wait for it until their timeout.
    flags = ["--kill-on-bad-exit=1"]
    if "cpus-per-process" in options:  # since SLURM 22.05, srun does not inherit it from the job
        flags.append(f"--cpus-per-task={options['cpus-per-process']}")
    lines = list[str]()
    if job.roles:
        flags += [f"--ntasks={total}", "--distribution=cyclic"]
        lines.append(f'export {TASKS}="{" ".join(f"{role}:{index}" for role, index in job.tasks())}"')
    command = f"exec srun {' '.join(flags)} {job.shell('python', '-m', 'trainkit')}"
    return job.script("sbatch FILE", head, [*lines, command])


def _mpirun(job: ManifestJob) -> str:
    """Return a script that runs mpirun of Open MPI, one process per rank."""
    # Open MPI binds a rank to a core, and PyTorch's threads with it.
    flags = [f"-n {job.hosts * job.per_host}", "--bind-to none"]
    if "names" in job.options:
        names = job.options["names"].split(",")
        flags.append(f"--host {','.join(f'{name}:{job.per_host}' for name in names)}")
        if job.hosts > 1:  # the ranks meet at rank 0, whose host Open MPI does not publish
            flags.append(f"-x MASTER_ADDR={names[0]}")
    return job.script("bash FILE", [], [f"exec mpirun {' '.join(flags)} {job.shell('python', '-m', 'trainkit')}"])


def _by_hand(job: ManifestJob, command: Callable[[Members, str, int], str]) -> str:
    """Return a line of shell for each task, to run on its host; each host has an equal share of the ranks."""
    hosts, tasks, port = job.options["names"].split(","), job.tasks(), int(job.options.get("port", _PORT))
    per_host, members = -(-len(tasks) // len(hosts)), dict[str, list[str]]()
    for rank, (role, _) in enumerate(tasks):
        host, offset = hosts[rank // per_host], rank % per_host
        members.setdefault(role, []).append(f"{f'[{host}]' if ':' in host else host}:{port + offset}")
    lines = [f"# {job.name} on {job.size}: run each line on its host. All hosts see this folder under the same path."]
    for role, index in tasks:
        about = f"# {role}:{index} on {members[role][index].rpartition(':')[0]}"
        lines += [about, command(members, role, index)]
    return "\n".join([*lines, ""])


def _with_tf_config(job: ManifestJob) -> str:
    def command(members: Members, role: str, index: int) -> str:
        return f"TF_CONFIG={shlex.quote(_tf_config(members, role, index))} {job.shell('python', '-m', 'trainkit')}"

    return _by_hand(job, command)


def _with_spec(job: ManifestJob) -> str:
    def command(members: Members, role: str, index: int) -> str:
        quoted = {name: [f'"{text}"' if text[0] == "[" else text for text in texts] for name, texts in members.items()}
        lists = (f"cluster.{name}=[{','.join(texts)}]" for name, texts in quoted.items())
        keys = shlex.join(["cluster=spec", *lists, f"cluster.task={role}:{index}"])
        return f"{job.shell('python', '-m', 'trainkit')} {keys}"

    return _by_hand(job, command)


def _kubernetes(job: ManifestJob) -> str:
    """Return a TrainJob of Kubeflow Trainer, which configures torchrun by PET_ variables; tasks with roles are indexed
    Jobs of Kubernetes itself.
    """
    image, namespace, claim = job.options["image"], job.options.get("namespace"), job.options.get("shared")

    def command(program: str) -> dict[str, Any]:
        # Kubernetes replaces $(NAME) in commands and arguments, and reads $$ as one dollar.
        arguments = [argument.replace("$(", "$$(") for argument in job.arguments]
        words = job.in_container(program, "-m", "trainkit", mounted_at=_SHARED)
        return {"command": words, "args": arguments or None}

    def gpus(role: str) -> dict[str, Any] | None:
        count = job.gpus_of(role)
        return {"limits": {"nvidia.com/gpu": str(count)}} if count else None

    def pod(container: dict[str, Any]) -> dict[str, Any]:
        """Return container and volume of a pod that mounts the claim that all share, if there is one."""
        if claim is None:
            return {"containers": [container]}
        return {
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
            "containers": [{**container, "volumeMounts": [{"name": "shared", "mountPath": _SHARED}]}],
        }

    if not job.roles:
        # `node` is what torch-distributed calls job and container.
        jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod({"name": "node"})}}}}]
        patch = {"manager": "trainkit.io/emit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        runtime = (
            ("apiGroup", "trainer.kubeflow.org"),
            ("kind", "ClusterTrainingRuntime"),
            ("name", "torch-distributed"),
        )
        trainer = {"image": image, "numNodes": job.hosts, "numProcPerNode": job.per_host, **command("torchrun")}
        return job.manifest("kubectl apply -f FILE", {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.label, "namespace": namespace},
            "spec": {
                "runtimeRef": dict(runtime),
                "trainer": {**trainer, "resourcesPerNode": gpus("worker")},
                "activeDeadlineSeconds": job.seconds,
                "runtimePatches": [patch] if claim is not None else None,
            },
        })  # fmt: skip
    # Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    selector = {"trainkit.io/run": job.label}
    names = {role: f"{job.label[:48].rstrip('-')}-{role}" for role in job.roles}
    members = {
        role: [f"{names[role]}-{index}.{job.label}:{_PORT}" for index in range(number)]
        for role, number in job.roles.items()
    }
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    own_index = {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    documents: list[dict[str, Any]] = [{
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label, "namespace": namespace},
        # Without publishNotReadyAddresses, a pod has no name until it is ready.
        "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
    }]  # fmt: skip
    for role, number in job.roles.items():
        # Kubernetes replaces $(NAME) by the variable above it.
        task = {"name": "TF_CONFIG", "value": _tf_config(members, role, "$(TASK_INDEX)")}
        container = {"name": "trainkit", "image": image, **command("python"), "env": [own_index, task]}
        spec = {"subdomain": job.label, "restartPolicy": "Never", **pod({**container, "resources": gpus(role)})}
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
                "template": {"metadata": {"labels": selector}, "spec": spec},
            },
        })  # fmt: skip
    return job.manifest("kubectl apply -f FILE", *documents)


def _vertex(job: ManifestJob) -> str:
    """Return a custom job: pools of chief, workers, servers and evaluator, in this order; Vertex AI sets TF_CONFIG."""
    options, (server, _, path) = job.options, job.options.get("shared", "").partition(":")

    def pool(role: str, count: int) -> dict[str, Any]:
        gpus = job.gpus_of(role)
        kind = options["accelerator"] if gpus else None
        # Vertex AI mounts NFS exports below /mnt/nfs.
        command = job.in_container("python", "-m", "trainkit", mounted_at=f"/mnt/nfs{_SHARED}")
        return {
            "machineSpec": {"machineType": options["machine"], "acceleratorType": kind, "acceleratorCount": gpus},
            "replicaCount": count,
            "containerSpec": {"imageUri": options["image"], "command": command, "args": list(job.arguments) or None},
            "nfsMounts": [{"server": server, "path": path, "mountPoint": "shared"}] if path else None,
        }

    roles = job.roles or {"chief": 1, "worker": job.hosts - 1}
    return job.manifest(f"gcloud ai custom-jobs create --region=REGION --display-name={job.label} --config=FILE", {
        "workerPoolSpecs": [pool(role, count) for role, count in roles.items() if count],
        "scheduling": {"timeout": f"{job.seconds}s"} if job.seconds else None,
    })  # fmt: skip


def _skypilot(job: ManifestJob) -> str:
    """Return a task: torchrun on every node, with the addresses that SkyPilot provides."""
    options, group = job.options, "--standalone"
    lines = [_linking(_SHARED)] if "shared" in options else []
    if job.hosts > 1:
        lines.append('head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)')
        group = '--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" --master-addr="$head" '
        group += '--master-port=29500 --rdzv-id="$SKYPILOT_TASK_ID"'
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
        "volumes": {_SHARED: options["shared"]} if "shared" in options else None,
        "setup": f"{options['setup']}\n" if "setup" in options else None,
        "run": "\n".join([*lines, start, ""]),
    })  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """An engine, and the flags of `emit` for it."""

    write: Callable[[ManifestJob], str]
    """Returns the script or manifest of a job."""
    kind: str
    """The launcher of its processes, in the words of `LaunchEnvironment.kind`."""
    options: str = ""
    """Flags it accepts in addition to those of every engine."""
    needs: tuple[str, ...] = ()
    """The flags it requires."""
    gpus_need: tuple[str, ...] = ()
    """The flags it requires if processes use GPUs."""
    hosts_need: tuple[str, ...] = ()
    """The flags it requires for several hosts."""
    takes_devices: bool = False
    """Whether it starts one process per host, which uses all devices."""
    takes_roles: bool = False
    """Whether it starts tasks of the roles chief, worker, ps and evaluator."""
    host_for_each: bool = False
    """Whether each task with a role is a host of its own there, a container, so that `--hosts` has no effect."""


ENGINES: Final[Mapping[str, Engine]] = {
    "torchrun": Engine(_torchrun, "torchrun", "setup head port restarts min-hosts", hosts_need=("head",)),
    "slurm": Engine(_slurm, "SLURM", "setup time partition account cpus-per-process", takes_roles=True),
    "kubernetes": Engine(
        _kubernetes, "torchrun", "image namespace time shared", needs=("image",), hosts_need=("shared",),
        takes_roles=True, host_for_each=True),
    "vertex": Engine(
        _vertex, "TF_CONFIG", "image machine accelerator time shared", needs=("image", "machine"),
        gpus_need=("accelerator",), hosts_need=("shared",), takes_devices=True, takes_roles=True, host_for_each=True),
    "skypilot": Engine(
        _skypilot, "torchrun", "accelerator image setup shared", gpus_need=("accelerator",), hosts_need=("shared",)),
    "mpirun": Engine(_mpirun, "Open MPI", "names setup", hosts_need=("names",)),
    "tf_config": Engine(_with_tf_config, "TF_CONFIG", "names port", needs=("names",), takes_roles=True),
    "spec": Engine(_with_spec, "cluster=spec", "names port", needs=("names",), takes_roles=True),
}  # fmt: skip
"""Engine -> the writer of its jobs."""
