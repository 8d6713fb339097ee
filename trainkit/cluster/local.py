"""The machine of this process, or the launch that its environment describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Final

from trainkit.cluster.base import Cluster
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.launchers import by_hand, mpich, open_mpi, pet, slurm, torchrun
from trainkit.cluster.members import launch_of
from trainkit.cluster.tf_config import read_tf_config
from trainkit.config.values import closest
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.fields import placement

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig

GROUP: Final = "trainkit.launchers"
"""Entry points of packages: the name of a launcher, and the function that reads it from the environment."""
VARIABLE: Final = "TRAINKIT_LAUNCHER"
"""The environment variable that selects the launcher to use, or `none`."""


def _tf_config(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    config = read_tf_config(environ)
    return None if config is None else launch_of(config.members, config.task, kind=config.variable)


LAUNCHERS: Final[Mapping[str, tuple[Callable[[Mapping[str, str]], LaunchEnvironment | None], tuple[str, ...]]]] = {
    "torchrun": (torchrun, ("TORCHELASTIC_RUN_ID",)),
    "environment": (by_hand, ("RANK", "WORLD_SIZE")),
    "tf_config": (_tf_config, ("TF_CONFIG", "CLUSTER_SPEC")),
    "openmpi": (open_mpi, ("OMPI_COMM_WORLD_SIZE",)),
    "mpich": (mpich, ("PMI_SIZE",)),
    "slurm": (slurm, ("SLURM_STEP_ID",)),
    "pet": (pet, ("PET_NNODES",)),
}
"""Launcher -> function that reads it, and the variables of which it sets at least one; the innermost launcher first.

torchrun started by srun is torchrun; mpirun in a job of SLURM is mpirun; variables that a user sets in a shell are
inside of the launcher that started the shell.
"""


def detect(environ: Mapping[str, str], *, launcher: str = "auto") -> LaunchEnvironment | None:
    """Return the launch that a process belongs to; a pure function.

    Args:
        environ: `os.environ`, or a replacement in a test.
        launcher: the launcher to use, `none`, or `auto`: the value of `TRAINKIT_LAUNCHER`, else the one that is
            found.

    Returns:
        None if this process is the only one: no launcher was found, or a group of one process. torchrun with
        restarts left is a launch even with one process: it may have had more members, and regain them.

    Raises:
        ConfigError: variables of one launcher are missing, not numbers, or contradict one another.

    Example:
        >>> hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        >>> detect(hand).kind, detect(hand).rank
        ('RANK and WORLD_SIZE', 1)
        >>> detect({}) is detect(hand | {"TRAINKIT_LAUNCHER": "none"}) is None
        True
    """
    choice = launcher if launcher != "auto" else environ.get(VARIABLE, "") or "auto"
    if choice == "none":
        return None
    if choice != "auto":
        return _selected(choice, environ)
    for name, (reader, marks) in LAUNCHERS.items():
        present = [bool(environ.get(mark)) for mark in marks]
        launch = reader(environ) if any(present) and (name != "environment" or all(present)) else None
        if launch is not None:
            return _if_shared(launch, environ)
    if environ.get("WORLD_SIZE") == "1" or not (environ.get("RANK") or environ.get("WORLD_SIZE")):
        return None
    half = by_hand(environ)  # only one of the two variables is set: the error names the missing one
    return None if half is None else _if_shared(half, environ)


def refuse_launched(environ: Mapping[str, str], starts: str, *, value: object = MISSING) -> None:
    """Refuse a process that a launcher started among others, where this process alone starts the others.

    Raises:
        ConfigError: a launcher started this process.
    """
    if (launch := detect(environ)) is not None:
        rule = f"{starts}, and {launch.kind} started {launch.num_ranks}. Start it once."
        raise ConfigError([Problem(key="cluster", value=value, rule=rule)])


def launch_problems(key: str, action: str, start: str) -> Iterator[Problem]:
    """Yield a problem if a launcher has started several processes like this one: each would do the same work.

    Args:
        key: the verb or flag.
        action: what each of them would do.
        start: how it is started instead.
    """
    launch = detect(os.environ)
    if launch is not None and launch.num_ranks > 1:
        rule = f"this is one of {launch.num_ranks} processes that {launch.kind} started, and each would {action}. "
        yield Problem(key=key, rule=f"{rule}Start {start}.", origin="command line")


def _if_shared(launch: LaunchEnvironment, environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch, or None if this process is its only one."""
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0") if launch.kind == "torchrun" else "0"
    if launch.num_ranks == 1 and restarts == "0":
        return None
    return replace(launch, ignore=f"{VARIABLE}=none")


def _selected(name: str, environ: Mapping[str, str]) -> LaunchEnvironment | None:
    origin = "environment" if environ.get(VARIABLE) == name else ""
    key = VARIABLE if origin else "cluster.launcher"
    if name in LAUNCHERS:
        reader, marks = LAUNCHERS[name]
    elif entries := entry_points(group=GROUP, name=name):
        reader, marks = entries[name].load(), ()
    else:
        near = closest(name, [*LAUNCHERS, "auto", "none"])
        hint = f"Did you mean {near}? " if near else ""
        rule = f"no such launcher. {hint}There are: {', '.join(LAUNCHERS)}, auto and none."
        raise ConfigError([Problem(key=key, value=name, rule=rule, origin=origin)])
    launch: LaunchEnvironment | None = reader(environ)
    if launch is None:
        see = f": see {' and '.join(marks)}" if marks else ""
        rule = f"this process was not started by it, or is the only one{see}."
        raise ConfigError([Problem(key=key, value=name, rule=rule, origin=origin)])
    return _if_shared(launch, environ)


@dataclass(frozen=True, kw_only=True)
class Local(Cluster):
    """The default: the launch in the environment, or this machine alone if there is none.

    Example:
        >>> Local(launcher="none").launch({"TF_CONFIG": "{}"}) is None
        True
    """

    launcher: Annotated[str, placement] = "auto"
    """The launcher; auto: the one in TRAINKIT_LAUNCHER, else the one that is found; none: ignore the environment.
    Another name is an entry point of a package.
    """

    def launch(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return the launch of this process, as found by `trainkit.cluster.local`."""
        return detect(environ, launcher=self.launcher)


def launch_environment_of(cfg: RunConfig) -> LaunchEnvironment | None:
    """Return the launch that this process belongs to, by the config's cluster and the environment.

    Returns:
        None if this process is the only one, and starts what the run needs.

    Raises:
        ConfigError: the cluster, or a variable of the launcher, has problems.
    """
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports the target

    cluster: Cluster = build(cfg.cluster, "cluster") if cfg.cluster else Local()
    return cluster.launch(os.environ)
