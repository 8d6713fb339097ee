"""The launchers `joblib`, `submitit_local`, `submitit_slurm` and `ray`: the sweep loop of `slots` with a backend."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from hydra.types import HydraContext
from omegaconf import DictConfig

from trainkit.config.schema import RunConfig
from trainkit.config.secrets.secrets import refuse_to_carry
from trainkit.errors import Problem
from trainkit.redaction import redacted_argument
from trainkit.sweeps.backends.base import JobBackend
from trainkit.sweeps.backends.remote import FOLDER, Remote
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.launching import Launching
from trainkit.sweeps.loop.slots import Slots
from trainkit.sweeps.loop.sweep import Sweep

ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "joblib": ("joblib_workers", "Joblib"),
    "ray": ("ray_tasks", "RayTasks"),
    "submitit_local": ("submitit_jobs", "SubmititLocal"),
    "submitit_slurm": ("submitit_jobs", "SubmititSlurm"),
}
"""Launcher -> module and class of its backend."""


class EngineLaunching(Launching):
    """Composes jobs and runs them with a backend, for the duration of a sweep.

    Raises:
        ConfigError: a key does not fit.
    """

    def __init__(
        self, *, hydra_context: HydraContext, config: DictConfig, launcher: str, keys: Mapping[str, Any]
    ) -> None:
        super().__init__(hydra_context=hydra_context, config=config)
        self._launcher = launcher
        module, name = ENGINES[launcher]
        kind: type[JobBackend] = getattr(import_module(f"trainkit.sweeps.backends.{module}"), name)
        self._engine = kind.of(keys)
        self._engine.require()
        self._remote = Remote(self._folder, self._slots_in)

    def _make_sweep(self) -> Sweep:
        return Sweep(
            folder=self._folder,
            slots=_Width(count=self._engine.width()),
            retries=self.settings.retries,
            on_error=self.settings.on_error,
            start=self._remote,
            command=tuple(map(redacted_argument, sys.argv[1:])),
        )

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source with the backend, and show the leaderboard."""
        with self._engine.connect(self._folder / FOLDER) as submitter, self._remote.connected(submitter):
            super().run(source)

    def _refuse_to_carry(self, secrets: Sequence[str]) -> None:
        if not self._engine.carries_secrets:
            refuse_to_carry(secrets, f"a job of {self._engine.name}", key=f"hydra/launcher={self._launcher}")

    def _slots_of(self, cfg: RunConfig) -> int:
        return self._engine.slots_of(super()._slots_of(cfg))

    def _slots_in(self, folder: Path) -> int:
        return next((job.slots for job in self._jobs.values() if job.folder == folder), 1)


class _Width(Slots):
    """Slots for jobs whose devices another system assigns."""

    def problems(self, wanted: Iterable[tuple[str, int]]) -> list[Problem]:
        """Return problems of jobs that have more processes than are submitted at a time."""
        key = "hydra.launcher.jobs_at_once"
        return [
            Problem(
                key=key, value=self.count, rule=f"{label or 'a job'} has {count} processes. Give it {count} or more."
            )
            for label, count in dict(wanted).items()
            if count > self.count
        ]
