"""Define the launcher `slots`, in the package that Hydra searches: it runs the jobs of a sweep on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

__all__ = ["SlotsLauncher"]


class SlotsLauncher(Launcher):
    """Starts each job in its own process and slots, and keeps the leaderboard of the sweep."""

    submits_single_runs = False
    """Whether it runs single runs, too: one that is no sweep trains in this process."""

    def __init__(self) -> None:
        self.launching: Any = None
        """`trainkit.sweeps.launching.Launching`, which creates and runs jobs for trainkit's searches."""

    @staticmethod
    def unused_keys(launcher: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys of `sweep` that another launcher does not read, and why they have no effect there."""
        del sweep
        if launcher != "slots":
            reason = f"has no effect with hydra/launcher={launcher}: it is for slots."
            yield from ((name, reason) for name in ("resume", "slots", "jobs_per_device", "retries", "on_error"))

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the jobs need; a job is a command, so the task function is not used."""
        del task_function
        from trainkit.sweeps.launching import Launching  # noqa: PLC0415 - Hydra loads every plugin on every start

        self.launching = Launching(hydra_context=hydra_context, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs."""
        returns: Sequence[JobReturn] = self.launching.launch(job_overrides, initial_job_idx)
        return returns


# A mapping, not a dataclass: Hydra executes this module before it is in `sys.modules`, where dataclasses look it up.
_NODE = {"_target_": "hydra_plugins.trainkit_slots.SlotsLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="slots", node=_NODE, provider="trainkit")
