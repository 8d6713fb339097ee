"""What every engine is told: a run, how many hosts, what is on each; and how an engine says what else it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task

__all__ = ["SHARED", "ManifestJob", "ManifestWriter", "block_yaml", "linking", "seconds_of"]

SHARED: Final = "/shared"
"""Where a container finds the file system that all hosts share."""
_TIME: Final = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")


@dataclass(frozen=True, kw_only=True)
class ManifestJob:
    """A run to be started by an engine.

    Example:
        >>> job = ManifestJob(name="digits", arguments=("epochs=3",), hosts=2, per_host=4, gpus=True)
        >>> job.size, job.count("process", "processes")
        ('2 hosts of 4 GPUs', '8 processes')
    """

    name: str
    """The run's name."""
    arguments: tuple[str, ...]
    """What trainkit is given, unquoted."""
    hosts: int
    """Hosts, each alike."""
    per_host: int
    """Processes of each, a replica each."""
    gpus: bool
    """Whether each process takes a GPU."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's own flags, by name without dashes."""

    @property
    def size(self) -> str:
        """Hosts and what each has, in words."""
        hosts = "a host" if self.hosts == 1 else f"{self.hosts} hosts"
        what = "GPU" if self.gpus else "process"
        return f"{hosts} of {self.per_host} {what}{'' if self.per_host == 1 else 's' if self.gpus else 'es'}"

    def count(self, word: str, plural: str) -> str:
        """The processes over all hosts, with the word for them."""
        number = self.hosts * self.per_host
        return f"{number} {word if number == 1 else plural}"

    @property
    def shell_arguments(self) -> str:
        """The arguments as a shell reads them."""
        return shlex.join(self.arguments)

    @property
    def label(self) -> str:
        """The name as Kubernetes and clouds take one: lower case, digits and dashes, a letter first, 63 at most.

        Example:
            >>> ManifestJob(name="My_run.2", arguments=(), hosts=1, per_host=1, gpus=False).label
            'my-run-2'
        """
        text = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (text if text[:1].isalpha() else f"run-{text}".rstrip("-"))[:63].rstrip("-")

    def launch(self, *, kind: str, takes_devices: bool) -> LaunchEnvironment | None:
        """What one of its processes will find, as far as a strategy judges by it; None for a single process."""
        count = self.hosts if takes_devices else self.hosts * self.per_host
        if count == 1:
            return None
        tasks = tuple(Task(role="worker", index=rank, rank=rank) for rank in range(count))
        return LaunchEnvironment(
            kind=kind, tasks=tasks, rank=0, local_rank=0, num_local=count // self.hosts, num_hosts=self.hosts,
            store=("127.0.0.1", 0), takes_devices=takes_devices,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ManifestWriter:
    """How the jobs of one engine are written."""

    write: Callable[[ManifestJob], str]
    """From a job to its script or manifest."""
    kind: str
    """What its processes will be started by, in the words of `Launch.kind`."""
    options: tuple[str, ...] = ()
    """Flags it takes beside those of every engine."""
    needs: tuple[str, ...] = ()
    """Those that it cannot do without."""
    gpus_need: tuple[str, ...] = ()
    """Those that it needs where processes take GPUs."""
    hosts_need: tuple[str, ...] = ()
    """Those that it needs for several hosts."""
    takes_devices: bool = False
    """Whether it starts one process a host, which takes all devices."""
    shares_nfs: bool = False
    """Whether `shared` is SERVER:/PATH of an NFS export; else it names a volume."""


def linking(mount_point: str) -> str:
    """The line of shell that puts a container's runs into a shared file system, with its folder left as it is."""
    return f"[ -e outputs ] || ln -s {shlex.quote(mount_point)} outputs"


def seconds_of(text: str) -> int | None:
    """A duration `[DAYS-]HH:MM:SS` in seconds; None where it is none.

    Example:
        >>> seconds_of("1-02:00:30"), seconds_of("90")
        (93630, None)
    """
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def block_yaml(document: Mapping[str, Any]) -> str:
    """YAML with its keys in order, and texts of several lines as blocks."""
    import yaml  # noqa: PLC0415 - only an engine that takes YAML needs it

    class Dumper(yaml.SafeDumper):
        pass

    def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, as_block)
    return yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, width=4096, allow_unicode=True)
