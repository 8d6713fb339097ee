"""Define the launchers of sweeps, in the package that Hydra searches: `slots` runs the jobs on this machine, the others
submit them to another system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

__all__ = ["EngineLauncher", "SlotsLauncher"]


class SlotsLauncher(Launcher):
    """Starts each job in its own process and slots, and keeps the leaderboard of the sweep."""

    submits_single_runs = False
    """Whether it runs single runs, too: one that is no sweep trains in this process."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys
        self.launching: Any = None
        """`trainkit.sweeps.launching.Launching`, which creates and runs jobs for trainkit's searches."""

    @staticmethod
    def unused_keys(launcher: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys of `sweep` that another launcher does not read, and why they have no effect there."""
        del sweep
        if launcher != "slots":
            reason = f"has no effect with hydra/launcher={launcher}: it is for slots."
            yield from (
                (name, reason) for name in ("resume", "slots", "jobs_per_device", "retries", "on_error", "budget")
            )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the jobs need; a job is a command, so the task function is not used."""
        del task_function
        from trainkit.sweeps.launching import Launching  # noqa: PLC0415 - Hydra loads every plugin on every start

        self.launching = Launching(hydra_context=hydra_context, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs."""
        returns: Sequence[JobReturn] = self.launching.launch(job_overrides, initial_job_idx)
        return returns


class EngineLauncher(SlotsLauncher):
    """Runs each job with a backend, and keeps the leaderboard of the sweep."""

    submits_single_runs = True

    @staticmethod
    def unused_keys(launcher: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys of `sweep` about sharing this machine: another system starts the jobs."""
        del sweep
        if launcher in _KEYS:
            reason = f"has no effect with hydra/launcher={launcher}: it is for slots. Give hydra.launcher.jobs_at_once."
            yield from ((name, reason) for name in ("slots", "jobs_per_device"))
            yield "budget", f"has no effect with hydra/launcher={launcher}: it is for slots."

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the jobs need."""
        del task_function
        from trainkit.sweeps.backends import EngineLaunching  # noqa: PLC0415 - as above

        self.launching = EngineLaunching(hydra_context=hydra_context, config=config, **self._keys)


_LOCAL = {"jobs_at_once": "auto", "timeout_min": 1440}
_KEYS: dict[str, dict[str, Any]] = {
    "ray": {"jobs_at_once": "auto", "address": None, "cpus_per_process": 1.0, "gpus_per_process": "auto"},
    "spark": {"jobs_at_once": "auto", "master": None},
    "submitit_local": _LOCAL,
    "submitit_slurm": {
        **_LOCAL,
        "partition": None,
        "nodes": 1,
        "tasks_per_node": 1,
        "gpus_per_node": 0,
        "cpus_per_task": None,
        "mem_gb": None,
        "save_s": 90,
        "max_requeues": 3,
        "additional": {},
    },
}
"""Keys of the backends' classes with their defaults, which a test compares: starting imports no class."""

# Mappings, not dataclasses: Hydra executes this module before it is in `sys.modules`, where dataclasses look it up.
_NODES = {"slots": {"_target_": "hydra_plugins.trainkit_launchers.SlotsLauncher"}} | {
    name: {"_target_": "hydra_plugins.trainkit_launchers.EngineLauncher", "launcher": name, **keys}
    for name, keys in _KEYS.items()
}
for _name, _node in _NODES.items():
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="trainkit")
