"""A cluster given in the config: the address of every task, by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from trainkit.cluster.base import Cluster
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.members import ROLES, launch_of, member_problems, parse_task, task_problem
from trainkit.cluster.tf_config import TfConfig, read_tf_config
from trainkit.errors import Problem, refuse
from trainkit.fields import placement


@dataclass(frozen=True, kw_only=True)
class Spec(Cluster):
    """Every task of the run by role and address. TF_CONFIG may give the same cluster, or the task of this process.

    Example:
        >>> spec = Spec(worker=("10.0.0.1:2222", "10.0.0.2:2222"), task="worker:1")
        >>> spec.launch({}).line()
        'launch by cluster=spec: rank 1 of 2 on 2 hosts, rendezvous at 10.0.0.1:2222'
    """

    chief: Annotated[str | tuple[str, ...] | None, placement] = None
    """HOST:PORT of the task that leads and trains; without one, worker 0 does."""
    worker: Annotated[tuple[str, ...], placement] = ()
    """HOST:PORT of every task that trains; several may share a host."""
    ps: Annotated[tuple[str, ...], placement] = ()
    """HOST:PORT of every parameter server."""
    evaluator: Annotated[tuple[str, ...], placement] = ()
    """HOST:PORT of the task that evaluates beside the training."""
    task: Annotated[str | None, placement] = None
    """The task of this process, ROLE:INDEX; null if TF_CONFIG gives it."""

    def __post_init__(self) -> None:
        refuse([*member_problems(self.members, key="cluster"), *self._task_problems()])

    @property
    def members(self) -> dict[str, tuple[str, ...]]:
        """Role -> addresses, for the roles that have any."""
        values = {role: getattr(self, role) for role in ROLES}
        listed = {role: (value,) if isinstance(value, str) else tuple(value or ()) for role, value in values.items()}
        return {role: texts for role, texts in listed.items() if texts}

    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return the launch of this cluster for this process; None for a cluster of one task that is not named.

        Raises:
            ConfigError: the task of this process is missing or contradicts TF_CONFIG, or a launcher is selected.
        """
        launcher = environ.get("TRAINKIT_LAUNCHER", "")
        tf_config = None if launcher == "none" else read_tf_config(environ)
        problems = [] if tf_config is None else list(self._differences(tf_config))
        if launcher not in ("", "auto", "none"):
            rule = "has no effect: cluster=spec lists all tasks. Unset it, or use cluster=local."
            problems.append(Problem(key="TRAINKIT_LAUNCHER", value=launcher, rule=rule, origin="environment"))
        task = tf_config.task if tf_config is not None and self.task is None else self.task and parse_task(self.task)
        if not task and not problems and sum(map(len, self.members.values())) > 1:
            names = ", ".join(f"{role}:{index}" for role, texts in self.members.items() for index in range(len(texts)))
            rule = f"is missing: it names the task of this process. Give cluster.task=ROLE:INDEX, of {names}."
            problems.append(Problem(key="cluster.task", rule=rule))
        refuse(problems)
        return launch_of(self.members, task, kind="cluster=spec") if task else None

    def _task_problems(self) -> Iterator[Problem]:
        if self.task is None:
            return
        try:
            role, index = parse_task(self.task)
            rule = task_problem(self.members, role, index) if self.members else None
        except ValueError as error:
            rule = str(error)
        if rule is not None:
            yield Problem(key="cluster.task", value=self.task, rule=rule)

    def _differences(self, tf_config: TfConfig) -> Iterator[Problem]:
        """Yield problems of differences between the config and the variable."""
        remedy = f"Make them the same, or unset {tf_config.variable}."
        for role in ROLES:
            configured, exported = self.members.get(role, ()), tf_config.members.get(role, ())
            if configured != exported:
                rule = f"is {_list_text(exported)}, but cluster.{role} is {_list_text(configured)}. {remedy}"
                yield Problem(key=f"{tf_config.variable}.cluster.{role}", rule=rule, origin="environment")
        if self.task is not None and tf_config.task != parse_task(self.task):
            rule = f"is {tf_config.task[0]}:{tf_config.task[1]}, but cluster.task is {self.task}. {remedy}"
            yield Problem(key=f"{tf_config.variable}.task", rule=rule, origin="environment")


def _list_text(texts: tuple[str, ...]) -> str:
    return f"[{', '.join(texts)}]" if texts else "none"
