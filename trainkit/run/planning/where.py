"""Describe the hosts, devices, mesh and stages on which the tasks of a plan run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Task
from trainkit.config.identity import fingerprint
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.traffic import StepCut, bubble_of

_LISTED: Final = 8
"""Up to this many tasks, each is named."""


def imagined_launch(hosts: int, gpus_per_host: int) -> LaunchEnvironment:
    """Return an imagined launch of one process per GPU on several hosts.

    Example:
        >>> imagined_launch(8, 8).num_ranks
        64
    """
    return LaunchEnvironment(
        kind=f"--hosts {hosts} --gpus-per-host {gpus_per_host}",
        tasks=workers(hosts * gpus_per_host),
        rank=0,
        local_rank=0,
        num_local=gpus_per_host,
        num_hosts=hosts,
        store=("host-0", 29400),
    )


def where_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines of `trainkit plan`: label, text."""
    yield "tasks", _tasks_text(plan)
    if 1 < plan.num_replicas < plan.num_computing:
        yield "ranks", f"{plan.num_replicas} replicas of {plan.num_computing // plan.num_replicas} each"
    if (bubble := ideal_bubble_of(plan)) is not None:
        yield "bubble", f"{bubble:.1%} of a step, with equal stages"
    yield "fingerprint", fingerprint(plan.cfg)[:12]


def ideal_bubble_of(plan: RunPlan) -> float | None:
    """Return the share of a step that each stage waits, with equal stages; None without stages."""
    cut = StepCut(num_shards=plan.batch.num_shards(0), num_replicas=plan.num_replicas)
    return bubble_of(plan.components.strategy, cut)


def _tasks_text(plan: RunPlan) -> str:
    tasks, launch = plan.tasks, plan.context.launch
    hosts = "" if launch is None or launch.num_hosts == 1 else f", {len(tasks) // launch.num_hosts} on each host"
    if len(tasks) > _LISTED:
        return ", ".join(_folded(tasks, by_type=launch is not None)) + hosts
    devices: dict[str, list[str]] = {}
    for task in tasks:
        others = [device for device in task.computes_on if device != task.device]
        place = f"{task.device}, computes on {', '.join(task.computes_on)}" if others else task.device
        devices.setdefault(place, []).append(str(task))
    placed = ", ".join(f"{' '.join(names)} on {device}" for device, names in devices.items())
    return f"{placed}{hosts}" if len(tasks) > 1 else f"{placed}, in this process"


def _folded(tasks: Sequence[Task], *, by_type: bool) -> Iterator[str]:
    """Yield a text for the tasks of each role, with consecutive numbers joined.

    Args:
        tasks: the tasks by rank.
        by_type: show only the types of devices: in a launch, numbers are known for this host only.
    """
    for role in dict.fromkeys(task.role for task in tasks):
        members = [task for task in tasks if task.role == role]
        last = members[-1].index
        names = f"{role}:{members[0].index}" + (f" to {role}:{last}" if len(members) > 1 else "")
        devices = list(dict.fromkeys(task.device.partition(":")[0] if by_type else task.device for task in members))
        placed = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
        yield f"{names} on {placed}"
