"""TF_CONFIG, and Vertex AI's CLUSTER_SPEC: a cluster and the task of this process, as JSON in one variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trainkit.cluster.members import ROLES, Members, member_problems, task_problem
from trainkit.config.values import closest, whole_number
from trainkit.errors import MISSING, Problem, refuse
from trainkit.files import parse_json

_POOLS: Final = {f"workerpool{number}": role for number, role in enumerate(ROLES)}
"""Vertex AI's names of the roles in CLUSTER_SPEC; its TF_CONFIG has the roles themselves."""


class Report(Protocol):
    """Adds the problem of a key inside of the variable."""

    def __call__(self, rule: str, *key: str, value: Any = None) -> None:
        """Add the problem."""


@dataclass(frozen=True, kw_only=True)
class TfConfig:
    """The content of the variable, free of problems."""

    variable: str
    """TF_CONFIG, or CLUSTER_SPEC."""
    members: Mapping[str, tuple[str, ...]]
    """Role -> HOST:PORT of its tasks by index."""
    task: tuple[str, int]
    """Role and index of this process."""


def read_tf_config(environ: Mapping[str, str]) -> TfConfig | None:
    """Read TF_CONFIG, or CLUSTER_SPEC if it is not set; None if neither is set.

    Raises:
        ConfigError: every problem of the variable.

    Example:
        >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> read_tf_config({"TF_CONFIG": text}).task
        ('worker', 1)

    Source: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG,
    https://cloud.google.com/vertex-ai/docs/training/distributed-training
    """
    variable = next((name for name in ("TF_CONFIG", "CLUSTER_SPEC") if environ.get(name)), None)
    if variable is None:
        return None
    problems = list[Problem]()

    def report(rule: str, *key: str, value: Any = None) -> None:
        value = MISSING if value is None else value
        problems.append(Problem(key=".".join([variable, *key]), value=value, rule=rule, origin="environment"))

    content: Any = {}
    try:
        content = parse_json(environ[variable])
    except ValueError as error:
        report(f"cannot be read: {error}. Correct it, or unset it: {variable}= trainkit ...")
    if not isinstance(content, dict):
        report("must be a JSON object with cluster and task.")
    refuse(problems)
    _report_misspelt(content, ("cluster", "task"), report)
    roles = _POOLS if variable == "CLUSTER_SPEC" else {}
    members = _members(content.get("cluster"), roles, report)
    if not problems:
        problems += member_problems(members, key=f"{variable}.cluster", origin="environment")
    role, index = _task(content.get("task"), roles, members, report)
    refuse(problems)
    members = {role: texts for role, texts in members.items() if texts}
    return TfConfig(variable=variable, members=members, task=(role, index))


def _members(cluster: Any, roles: Mapping[str, str], report: Report) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, dict):
        rule = "must be an object: role to addresses."
        report('is missing: {"worker": ["HOST:PORT", ...]}.' if cluster is None else rule, "cluster")
        return {}
    members: dict[str, tuple[str, ...]] = {}
    for name, value in cluster.items():
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            report("must be a list of HOST:PORT.", "cluster", roles.get(name, name))
            continue
        members[roles.get(name, name)] = tuple(texts)
    return members


def _task(task: Any, roles: Mapping[str, str], members: Members, report: Report) -> tuple[str, int]:
    if not isinstance(task, dict):
        rule = "is missing: it names" if task is None else "must be an object that names"
        report(f'{rule} the task of this process, {{"type": "worker", "index": 0}}.', "task")
        return "", 0
    _report_misspelt(task, ("type", "index"), report, "task")
    role, index = task.get("type"), task.get("index")
    role = roles.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        rule = "is missing" if role is None else "no such role"
        report(f"{rule}. There are: {', '.join(ROLES)}.", "task", "type", value=role)
    # TensorFlow accepts an index that is written as text, too.
    number = whole_number(str(index), low=0, high=2**31 - 1) if isinstance(index, str | int) else None
    if number is None or isinstance(index, bool):
        rule = "is missing: a whole number, 0 or more." if index is None else "must be a whole number, 0 or more."
        report(rule, "task", "index", value=index)
    elif role in ROLES and any(members.values()) and (wrong := task_problem(members, role, number)):
        report(wrong, "task", value=f"{role}:{number}")
    return str(role), number or 0


def _report_misspelt(content: Mapping[str, Any], names: Sequence[str], report: Report, *key: str) -> None:
    """Report each key that is almost a known one; others are those of a cloud, and not for trainkit."""
    for name in content:
        if name not in names and (near := closest(name, names)) is not None:
            report(f"no such key. Did you mean {near}?", *key, name)
