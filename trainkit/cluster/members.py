"""The tasks of a cluster by role and address, and the rules for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainkit.cluster.address import Address, is_loopback
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.values import closest
from trainkit.errors import Problem

ROLES: Final = ("chief", "worker", "ps", "evaluator")
"""Roles in the order of their ranks. Without a chief, worker 0 has rank 0 and acts as chief: TensorFlow's rule."""
_SINGLE: Final = ("chief", "evaluator")

Members = Mapping[str, Sequence[str]]
"""Role -> HOST:PORT of its tasks by index."""


def member_problems(members: Members, *, key: str, origin: str = "") -> Iterator[Problem]:
    """Yield everything that is wrong with the addresses."""
    owners: dict[Address, str] = {}
    for role, texts in members.items():
        inner = f"{key}.{role}"
        if role not in ROLES:
            yield Problem(key=inner, rule=_unknown_role(role), origin=origin)
            continue
        if role in _SINGLE and len(texts) > 1:
            other = " List the others under worker." if role == "chief" else ""
            rule = f"a cluster has one {role}, and {len(texts)} are given.{other}"
            yield Problem(key=inner, value=f"[{', '.join(texts)}]", rule=rule, origin=origin)
        for index, text in enumerate(texts):
            try:
                address = Address.parse(text).canonical
            except ValueError as error:
                yield Problem(key=inner, value=text, rule=str(error), origin=origin)
                continue
            if address in owners:
                rule = f"is also the address of {owners[address]}. Every task needs its own."
                yield Problem(key=inner, value=text, rule=rule, origin=origin)
            owners.setdefault(address, f"{role}:{index}")
    yield from _cluster_problems(members, owners, key, origin)


def _cluster_problems(members: Members, owners: Mapping[Address, str], key: str, origin: str) -> Iterator[Problem]:
    if not any(members.values()):
        rule = "names no task. It needs at least one worker: worker=[HOST:PORT,...]."
        yield Problem(key=key, rule=rule, origin=origin)
    elif not members.get("chief") and not members.get("worker") and all(role in ROLES for role in members):
        rule = "has neither chief nor worker, so no task would train. Add worker=[HOST:PORT,...]."
        yield Problem(key=key, rule=rule, origin=origin)
    local = [address for address in owners if is_loopback(address.host)]
    if local and len(local) < len(owners):
        remedy = f"{owners[local[0]]} needs a name that other hosts can reach."
        yield Problem(key=key, rule=f"{local[0]} is the local machine on every host: {remedy}", origin=origin)


def parse_task(text: str) -> tuple[str, int]:
    """Read `worker:1`.

    Raises:
        ValueError: the text is not ROLE:INDEX; the message is the rule that it breaks.

    Example:
        >>> parse_task("ps:0")
        ('ps', 0)
    """
    match = re.fullmatch(r"([A-Za-z_]+):([0-9]+)", text)
    if match is None:
        raise ValueError("must be ROLE:INDEX, as in worker:0.")
    if match[1] not in ROLES:
        raise ValueError(_unknown_role(match[1]))
    return match[1], int(match[2])


def task_problem(members: Members, role: str, index: int) -> str | None:
    """Return what is wrong with a task of this cluster, as the rule that it breaks; None if nothing is."""
    count = len(members.get(role, ()))
    if index < count:
        return None
    if count == 0:
        stand_in = " Without one, worker:0 acts as the chief." if role == "chief" and members.get("worker") else ""
        tasks = ", ".join(f"{name}:{number}" for name in ROLES for number in range(len(members.get(name, ()))))
        return f"the cluster has no {role}.{stand_in} Its tasks: {tasks}."
    last = "" if count == 1 else f" to {role}:{count - 1}"
    return f"the cluster has {count} {role}{'' if count == 1 else 's'}, {role}:0{last}."


def tasks_of(members: Members) -> tuple[tuple[Task, ...], tuple[Address, ...]]:
    """Return the tasks by rank, and the address of each.

    Example:
        >>> tasks, _ = tasks_of({"worker": ["a:1", "b:1"], "chief": ["c:1"]})
        >>> [str(task) for task in tasks]
        ['chief:0', 'worker:0', 'worker:1']
    """
    placed = [(role, index, text) for role in ROLES for index, text in enumerate(members.get(role, ()))]
    tasks = tuple(Task(role=role, index=index, rank=rank) for rank, (role, index, _) in enumerate(placed))
    return tasks, tuple(Address.parse(text) for _, _, text in placed)


def launch_of(members: Members, task: tuple[str, int], *, kind: str) -> LaunchEnvironment:
    """Return the launch that a cluster without problems describes, for one of its tasks.

    The rendezvous is at the address of rank 0. Tasks with the same host, as written, share it; a task that has a host
    of its own uses all its devices, as TensorFlow's tasks do.
    """
    tasks, addresses = tasks_of(members)
    rank = next(item.rank for item in tasks if (item.role, item.index) == task)
    hosts = [address.canonical.host for address in addresses]
    return LaunchEnvironment(
        kind=kind,
        tasks=tasks,
        rank=rank,
        local_rank=hosts[:rank].count(hosts[rank]),
        num_local=hosts.count(hosts[rank]),
        num_hosts=len(set(hosts)),
        store=addresses[0],
        takes_devices=True,
        hosts_store=rank == 0,
        addresses=tuple(map(str, addresses)),
        by_hand=True,
        names_roles=True,
    )


def _unknown_role(role: str) -> str:
    near = closest(role, ROLES)
    hint = f"Did you mean {near}? " if near else ""
    return f"no such role. {hint}There are: {', '.join(ROLES)}."
