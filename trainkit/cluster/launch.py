"""External launches: the processes of a run that another program or user started (torchrun, srun, mpirun, by hand)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.cluster.address import Address, interface_of, is_loopback, own_address
from trainkit.cluster.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnvironment:
    """The facts that a process knows about its process group before it connects to the others.

    Example:
        >>> launch = LaunchEnvironment(
        ...     kind="torchrun", tasks=workers(4), rank=3, local_rank=1, num_local=2, num_hosts=2,
        ...     store=("10.0.0.1", 29400), ignore="TRAINKIT_LAUNCHER=none",
        ... )
        >>> launch.num_ranks, str(launch.task)
        (4, 'worker:3')
        >>> print(launch.line())
        launch by torchrun: rank 3 of 4 on 2 hosts, rendezvous at 10.0.0.1:29400 (TRAINKIT_LAUNCHER=none ignores it)
    """

    kind: str
    """The launcher that started it, as shown to the user: torchrun, SLURM, Open MPI, MPICH, TF_CONFIG."""
    tasks: tuple[Task, ...]
    """All processes of the run by rank; the strategy chooses the devices."""
    rank: int
    """The rank of this process."""
    local_rank: int
    """The rank of this process among those of this host; selects its GPU."""
    num_local: int
    """Number of processes of this host."""
    num_hosts: int
    """Number of hosts; if processes of one host cannot be recognized, the number of processes."""
    store: tuple[str, int]
    """Host and port of the rendezvous store."""
    takes_devices: bool = False
    """Whether each process is a whole host that uses all its devices, with a rank each; otherwise it is one rank."""
    has_own_gpu: bool = False
    """Whether each process of this host sees one GPU, different for each; known after the rendezvous."""
    hosts_store: bool = False
    """Whether this process must open the store; False: the launcher or another rank opens it."""
    attempt: int = 0
    """Restarts of the group so far, as counted by the launcher; torchrun does not count a change of its members."""
    name: str = ""
    """The name of the launch, the same on every rank and at every restart; empty if the launcher gives none."""
    addresses: tuple[str, ...] = ()
    """The address of each task for messages, by rank; empty if the launcher gives none."""
    by_hand: bool = False
    """Whether each task may have been started by hand, in a terminal of its own."""
    names_roles: bool = False
    """Whether the user named the role of each task; False: all are workers until the strategy gives them roles."""
    ignore: str = ""
    """The setting that makes a process ignore this launch; empty if the config asked for it."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LaunchEnvironment:
        """Return the launch whose fields, by `dataclasses.asdict`, were written as JSON."""
        host, port = values["store"]
        tasks = tuple(Task.from_json(task) for task in values["tasks"])
        return cls(**{**values, "tasks": tasks, "store": (host, port), "addresses": tuple(values["addresses"])})

    @property
    def num_ranks(self) -> int:
        """Number of processes of the run, over all roles."""
        return len(self.tasks)

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self.tasks[self.rank]

    @property
    def has_evaluator(self) -> bool:
        """Whether the last task evaluates the checkpoints of the others."""
        return self.tasks[-1].is_evaluator

    @property
    def training(self) -> LaunchEnvironment:
        """The launch without its evaluator, for which no task waits; the evaluator sees it as rank 0 does.

        Example:
            >>> tasks = (*workers(1), Task(role="evaluator", index=0, rank=1))
            >>> launch = LaunchEnvironment(
            ...     kind="TF_CONFIG", tasks=tasks, rank=1, local_rank=1, num_local=2, num_hosts=1, store=("a", 1),
            ...     addresses=("a:1", "a:2"),
            ... )
            >>> launch.training.rank, launch.training.num_local, launch.training.num_ranks
            (0, 1, 1)
        """
        if not self.has_evaluator:
            return self
        rank = 0 if self.task.is_evaluator else self.rank
        hosts = [Address.parse(text).canonical.host for text in self.addresses[:-1]]
        return replace(
            self,
            tasks=self.tasks[:-1],
            addresses=self.addresses[:-1],
            rank=rank,
            local_rank=hosts[:rank].count(hosts[rank]),
            num_local=hosts.count(hosts[rank]),
            num_hosts=len(set(hosts)),
        )

    def place_of(self, rank: int) -> str:
        """Return a task with its address for messages: `worker:1 (10.0.0.2:2222)`."""
        task = str(self.tasks[rank])
        return f"{task} ({self.addresses[rank]})" if self.addresses else task

    def line(self) -> str:
        """Return one line about the launch, with the setting that ignores it."""
        role = "" if all(task.index == task.rank for task in self.tasks) else f" ({self.task})"
        hosts = "one host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        hint = f" ({self.ignore} ignores it)" if self.ignore else ""
        position = f"rank {self.rank}{role} of {self.num_ranks} on {hosts}"
        return f"launch by {self.kind}: {position}, rendezvous at {Address(*self.store)}{hint}"


def workers(count: int) -> tuple[Task, ...]:
    """Return the tasks of a launch without roles: workers, by rank.

    Example:
        >>> [str(task) for task in workers(2)]
        ['worker:0', 'worker:1']
    """
    return tuple(Task(role="worker", index=rank, rank=rank) for rank in range(count))


def socket_environ(store: str, *, on_one_host: bool) -> dict[str, str]:
    """Return the environment for gloo: loopback on one host, else the interface that reaches the host of the store."""
    if on_one_host or is_loopback(store):
        name: str | None = "lo0" if sys.platform == "darwin" else "lo"
    else:
        address = own_address(store)
        if address is not None and is_loopback(address):  # the store is here, under a name that resolves to this host
            address = own_address()
        name = None if address is None else interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
