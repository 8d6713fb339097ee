"""The description of a run for every engine: its hosts, their devices and tasks; the interface of a manifest writer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.members import ROLES
from trainkit.cluster.tasks import Task

SHARED: Final = "/shared"
"""The path in a container of the file system that all hosts share."""
_UNITS: Final = (1, 60, 3600, 24 * 3600)
"""Seconds of the parts of a duration, from its end."""


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
        hosts = "a host" if self.hosts == 1 else f"{self.hosts} hosts"
        if self.roles:
            return ", ".join(f"{number} {role}" for role, number in self.roles.items())
        what = "GPU" if self.gpus else "process"
        return f"{hosts} of {self.per_host} {what}{'' if self.per_host == 1 else 's' if self.gpus else 'es'}"

    @property
    def counts(self) -> Mapping[str, int]:
        """Role -> number of its tasks."""
        return self.roles or {"worker": self.hosts * self.per_host}

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

    def gpus_of(self, role: str) -> int | None:
        """Return the number of GPUs of a task that is alone on its host; None without any."""
        return self.per_host if self.gpus and role in ("chief", "worker") else None

    def shell(self, *program: str) -> str:
        """Return a command with the arguments, quoted for a shell."""
        return shlex.join([*program, *self.arguments])

    def in_container(self, *program: str, mounted_at: str) -> list[str]:
        """Return the command of a container, which links its outputs into the shared file system, if it has one."""
        link = ["sh", "-c", f'{linking(mounted_at)}; exec "$@"', "sh"] if "shared" in self.options else []
        return [*link, *program]

    def script(self, head: Sequence[str], lines: Sequence[str]) -> str:
        """Return a script of bash that runs `--setup` between its head and its other lines."""
        setup = [self.options["setup"]] if "setup" in self.options else []
        return "\n".join(["#!/usr/bin/env bash", *head, *setup, *lines, ""])

    def manifest(self, start: str, *documents: Mapping[str, Any]) -> str:
        """Return documents as YAML, without the keys whose value is None, below the command that starts them."""
        text = "---\n".join(block_yaml(_given(one)) for one in documents)
        return f"# {self.name} on {self.size}: {start}\n{text}"

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

    def launch(self, *, kind: str, takes_devices: bool) -> LaunchEnvironment | None:
        """Return the launch of one process, with the fields that a strategy checks; None for a single process."""
        tasks = tuple(Task(role=role, index=at, rank=rank) for rank, (role, at) in enumerate(roles_in(self.roles)))
        tasks = tasks or workers(self.hosts if takes_devices else self.hosts * self.per_host)
        if len(tasks) == 1:
            return None
        each = -(-len(tasks) // self.hosts)
        return LaunchEnvironment(
            kind=kind, tasks=tasks, rank=0, local_rank=0, num_local=each, num_hosts=self.hosts, store=("127.0.0.1", 0),
            takes_devices=each == 1 if self.roles else takes_devices, names_roles=bool(self.roles),
        )  # fmt: skip


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


def linking(mount_point: str) -> str:
    """Return the line of shell that links a container's outputs into a shared file system, if there are none yet."""
    return f"[ -e outputs ] || ln -s {shlex.quote(mount_point)} outputs"


def _given(node: Any) -> Any:
    """Return a document without the keys whose value is None."""
    if isinstance(node, Mapping):
        return {key: _given(value) for key, value in node.items() if value is not None}
    return [_given(one) for one in node] if isinstance(node, list) else node


def block_yaml(document: Mapping[str, Any]) -> str:
    """Return YAML with keys in the given order, and texts of several lines as blocks."""
    import yaml  # noqa: PLC0415 - only an engine that takes YAML needs it

    class Dumper(yaml.SafeDumper):
        """One of its own: the representer is not for other documents."""

    def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, as_block)
    return yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, width=4096, allow_unicode=True)


def roles_in(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield role and index of every task, in the order of the ranks.

    Example:
        >>> list(roles_in({"ps": 1, "chief": 1, "worker": 2}))
        [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
    """
    yield from ((role, index) for role in ROLES for index in range(counts.get(role, 0)))


def members_on(counts: Mapping[str, int], hosts: Sequence[str], *, port: int) -> dict[str, list[str]]:
    """Return role -> HOST:PORT of its tasks, the tasks of equal shares of the ranks on each host.

    Example:
        >>> members_on({"worker": 4}, ["a", "b"], port=2222)
        {'worker': ['a:2222', 'a:2223', 'b:2222', 'b:2223']}
    """
    tasks = list(roles_in(counts))
    members: dict[str, list[str]] = {}
    each = -(-len(tasks) // len(hosts))
    for rank, (role, _) in enumerate(tasks):
        host, place = divmod(rank, each)
        name = f"[{hosts[host]}]" if ":" in hosts[host] else hosts[host]
        members.setdefault(role, []).append(f"{name}:{port + place}")
    return members


def tf_config(members: Mapping[str, Sequence[str]], role: str, index: int | str) -> str:
    """Return the content of TF_CONFIG for one task.

    Example:
        >>> tf_config({"worker": ["a:1"]}, "worker", 0)
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'

    Source: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
    """
    cluster = {name: list(texts) for name, texts in members.items()}
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
