"""The launcher `slots`: the jobs that Hydra's sweeper asks for become processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from trainkit.sweeps.jobs import Job, Sweep, free_folder

__all__ = ["Slots"]


class Slots:
    """Runs batches of jobs; lives as long as the sweep.

    Args:
        hydra_context: knows how to compose a job, and the command that runs one.
        config: of the sweep.
    """

    def __init__(self, *, hydra_context: HydraContext, config: DictConfig) -> None:
        self._loader: Any = hydra_context.config_loader
        self._config = config
        self._sweep = Sweep(folder=Path(str(config.hydra.sweep.dir)))

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Compose all jobs of a batch, then run them, and show the leaderboard so far.

        Args:
            job_overrides: the arguments of each job.
            first: the number of the first one.

        Returns:
            One `JobReturn` a job, with its exit code: a job that failed is no reason to end the search.
        """
        setup_globals()
        composed = [self._compose(list(line), first + place) for place, line in enumerate(job_overrides)]
        try:
            codes = self._sweep.run([job for _, job in composed])
        finally:
            self._sweep.finish()
        return [_returned(config, job, code) for (config, job), code in zip(composed, codes, strict=True)]

    def _compose(self, overrides: list[str], number: int) -> tuple[DictConfig, Job]:
        config = self._loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # `hydra.sweep.subdir` asks for the job's number
        folder = free_folder(self._sweep.folder / str(OmegaConf.select(config, "hydra.sweep.subdir")))
        arguments = [*overrides, *self._config.hydra.overrides.hydra]
        return config, Job(
            name=str(number),
            folder=folder,
            overrides=tuple(overrides),
            command=tuple(self._loader.command(arguments, folder)),
        )


def _returned(config: DictConfig, job: Job, code: int) -> JobReturn:
    done = JobReturn()
    done.overrides = list(job.overrides)
    done.cfg = config
    done.hydra_cfg = OmegaConf.masked_copy(config, "hydra")
    done.working_dir = str(job.folder)
    done.task_name = config.hydra.job.name
    done.status = JobStatus.COMPLETED
    done.return_value = code
    return done
