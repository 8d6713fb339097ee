"""Tasks with roles (chief, worker, ps, evaluator) on the hosts of a job, and TF_CONFIG of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from trainkit.cluster.members import ROLES


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
