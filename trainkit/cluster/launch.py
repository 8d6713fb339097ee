"""A launch: the processes of a run that something else started (torchrun, srun, mpirun, a person at each host)."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.tasks import Task

__all__ = ["Launch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a process knows of the group it was started in, before it has met the others.

    Example:
        >>> tasks = tuple(Task(role="worker", index=rank, rank=rank) for rank in range(4))
        >>> launch = Launch(
        ...     kind="torchrun", tasks=tasks, rank=3, local_rank=1, num_local=2, num_hosts=2, store=("10.0.0.1", 29400)
        ... )
        >>> launch.num_ranks, str(launch.task)
        (4, 'worker:3')
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
    hosts_store: bool = False
    """Whether this process has to open the store; False: the launcher, or another rank, does."""
    attempt: int = 0
    """Restarts of the group so far."""
    name: str = ""
    """Names the launch, the same on every rank and at every restart; empty where the launcher gives none."""

    @property
    def num_ranks(self) -> int:
        """Processes of the run, over all roles."""
        return len(self.tasks)

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self.tasks[self.rank]
