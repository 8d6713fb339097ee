"""A launch: the processes of a run that something else started (torchrun, srun, mpirun, a person at each host)."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.address import Address
from trainkit.cluster.tasks import Task

__all__ = ["LaunchEnvironment", "workers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnvironment:
    """What a process knows of the group it was started in, before it has met the others.

    Example:
        >>> launch = LaunchEnvironment(
        ...     kind="torchrun", tasks=workers(4), rank=3, local_rank=1, num_local=2, num_hosts=2,
        ...     store=("10.0.0.1", 29400), ignore="TRAINKIT_LAUNCHER=none",
        ... )
        >>> launch.num_ranks, str(launch.task)
        (4, 'worker:3')
        >>> print(launch.line())
        launch by torchrun: rank 3 of 4 on 2 hosts, meeting at 10.0.0.1:29400 (TRAINKIT_LAUNCHER=none ignores it)
    """

    kind: str
    """What started it, in the words of the line that the user reads: torchrun, SLURM, Open MPI, MPICH, TF_CONFIG."""
    tasks: tuple[Task, ...]
    """Every process of the run by rank; devices are for the strategy to choose."""
    rank: int
    """The place of this process among them."""
    local_rank: int
    """Its place among those of this host: what chooses its GPU."""
    num_local: int
    """Processes of this host."""
    num_hosts: int
    """Hosts that take part; where processes of one host cannot be told apart, the number of processes."""
    store: tuple[str, int]
    """Host and port where the ranks meet."""
    takes_devices: bool = False
    """Whether each process stands for a host and takes all its devices, a rank each; else it is one rank."""
    hosts_store: bool = False
    """Whether this process has to open the store; False: the launcher, or another rank, does."""
    attempt: int = 0
    """Restarts of the group so far, as the launcher counts them; torchrun does not count a change of its members."""
    name: str = ""
    """Names the launch, the same on every rank and at every restart; empty where the launcher gives none."""
    addresses: tuple[str, ...] = ()
    """Where each task runs, by rank, as one would name it to a person; empty where the launcher does not tell."""
    ignore: str = ""
    """The setting that makes a process take no notice of this launch; empty where the config asked for it."""

    @property
    def num_ranks(self) -> int:
        """Processes of the run, over all roles."""
        return len(self.tasks)

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self.tasks[self.rank]

    def place_of(self, rank: int) -> str:
        """A task as one would name it to a person who looks for it: `worker:1 (10.0.0.2:2222)`."""
        task = str(self.tasks[rank])
        return f"{task} ({self.addresses[rank]})" if self.addresses else task

    def line(self) -> str:
        """What was found, in one line, and how to have it ignored."""
        own = "" if all(task.index == task.rank for task in self.tasks) else f" ({self.task})"
        hosts = "one host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        hint = f" ({self.ignore} ignores it)" if self.ignore else ""
        place = f"rank {self.rank}{own} of {self.num_ranks} on {hosts}"
        return f"launch by {self.kind}: {place}, meeting at {Address(*self.store)}{hint}"


def workers(count: int) -> tuple[Task, ...]:
    """The tasks of a launch that knows no roles: workers, by rank.

    Example:
        >>> [str(task) for task in workers(2)]
        ['worker:0', 'worker:1']
    """
    return tuple(Task(role="worker", index=rank, rank=rank) for rank in range(count))
