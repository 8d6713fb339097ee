"""TF_CONFIG, and Vertex AI's CLUSTER_SPEC: a cluster and the task of this process, as JSON in one variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainkit.cluster.members import ROLES, member_problems, task_problem
from trainkit.config.values import closest, whole_number
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.files import parse_json

_POOLS: Final = {f"workerpool{number}": role for number, role in enumerate(ROLES)}
"""Vertex AI's names of the roles in CLUSTER_SPEC; its TF_CONFIG has the roles themselves."""


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
    content = _content(variable, environ[variable])
    if variable == "CLUSTER_SPEC":
        content = _with_roles(content)
    problems = [*_misspelt(variable, content, ("cluster", "task")), *_shape_problems(variable, content)]
    members = {} if problems else {role: _texts(value) for role, value in content["cluster"].items()}
    if not problems:
        problems += member_problems(members, key=f"{variable}.cluster", origin="environment")
    problems += _task_problems(variable, content.get("task", MISSING), members)
    if problems:
        raise ConfigError(problems)
    task = (content["task"]["type"], int(content["task"]["index"]))
    return TfConfig(variable=variable, members={role: texts for role, texts in members.items() if texts}, task=task)


def _content(variable: str, text: str) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except ValueError as error:
        rule = f"cannot be read: {error}. Correct it, or unset it: {variable}= trainkit ..."
        raise ConfigError([_problem(variable, rule)]) from None
    if not isinstance(content, dict):
        rule = "must be a JSON object with cluster and task."
        raise ConfigError([_problem(variable, rule)])
    return content


def _with_roles(content: dict[str, Any]) -> dict[str, Any]:
    """Replace Vertex AI's names by the roles."""
    cluster, task = content.get("cluster"), content.get("task")
    if isinstance(cluster, dict):
        cluster = {_POOLS.get(name, name): value for name, value in cluster.items()}
    if isinstance(task, dict) and isinstance(task.get("type"), str):
        task = {**task, "type": _POOLS.get(task["type"], task["type"])}
    return {**content, "cluster": cluster, "task": task}


def _shape_problems(variable: str, content: Mapping[str, Any]) -> Iterator[Problem]:
    cluster = content.get("cluster")
    if not isinstance(cluster, dict):
        rule = "must be an object: role to addresses."
        yield _problem(
            f"{variable}.cluster", 'is missing: {"worker": ["HOST:PORT", ...]}.' if cluster is None else rule
        )
        return
    for role, value in cluster.items():
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            yield _problem(f"{variable}.cluster.{role}", "must be a list of HOST:PORT.")


def _task_problems(variable: str, task: Any, members: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    key = f"{variable}.task"
    if not isinstance(task, dict):
        rule = "is missing: it names" if task is MISSING or task is None else "must be an object that names"
        rule += ' the task of this process, {"type": "worker", "index": 0}.'
        yield _problem(key, rule)
        return
    yield from _misspelt(key, task, ("type", "index"))
    role, index = task.get("type"), task.get("index")
    known = isinstance(role, str) and role in ROLES
    if not known:
        rule = "is missing" if role is None else "no such role"
        yield _problem(f"{key}.type", f"{rule}. There are: {', '.join(ROLES)}.", role)
    number = _index(index)
    if number is None:
        rule = "is missing: a whole number, 0 or more." if index is None else "must be a whole number, 0 or more."
        yield _problem(f"{key}.index", rule, index)
    elif known and any(members.get(name) for name in ROLES):
        rule_of_task = task_problem(members, str(role), number)
        if rule_of_task:
            yield _problem(key, rule_of_task, f"{role}:{number}")


def _misspelt(key: str, content: Mapping[str, Any], known: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each key that is almost a known one; others are those of a cloud, and not for trainkit."""
    for name in content:
        if name not in known and (near := closest(name, known)) is not None:
            yield _problem(f"{key}.{name}", f"no such key. Did you mean {near}?")


def _problem(key: str, rule: str, value: Any = None) -> Problem:
    return Problem(key=key, value=MISSING if value is None else value, rule=rule, origin="environment")


def _index(value: Any) -> int | None:
    """Return an index as a number; TensorFlow accepts one written as text too."""
    if isinstance(value, str):
        return whole_number(value, low=0, high=2**31 - 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
