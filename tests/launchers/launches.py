"""Launches made by hand."""

from typing import Any

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task


def launch_of(num_ranks: int = 2, **settings: Any) -> LaunchEnvironment:
    """A launch of torchrun's on one host, as its rank 0 sees it."""
    tasks = tuple(Task(role="worker", index=rank, rank=rank) for rank in range(num_ranks))
    defaults = {
        "kind": "torchrun", "tasks": tasks, "rank": 0, "local_rank": 0, "num_local": num_ranks, "num_hosts": 1,
        "store": ("127.0.0.1", 29400),
    }  # fmt: skip
    return LaunchEnvironment(**{**defaults, **settings})
