"""The launcher `slots`: runs the jobs of a Hydra sweeper, or of a search, as processes of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from trainkit.config.composition import dotted
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.identity import tag_of
from trainkit.config.schema import RunConfig
from trainkit.config.sections import SweepConfig as Settings
from trainkit.config.targets.build import build
from trainkit.config.values import leaves, path_rule
from trainkit.errors import ConfigError, Problem
from trainkit.fields import Tag
from trainkit.redaction import redacted_argument, variable_of
from trainkit.run.process.fork_server import JOB_IMPORTS, ForkServerClient
from trainkit.run.process.worker_group import WorkerGroup
from trainkit.sweeps.budget import Budget
from trainkit.sweeps.job_sources import JobList, JobSource, SweepJob, job_return
from trainkit.sweeps.loop import JobCommand, JobProcess, Slots, Sweep, start_fresh, started_in
from trainkit.sweeps.results.job_results import SWEEP_FILE
from trainkit.sweeps.screen import print_line
from trainkit.trainer.ownership import free_name

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy


class WarmStarter(ForkServerClient):
    """Starts trainkit jobs as forks of one process that has imported their modules, and other jobs as new processes.

    That process ends with the block; a job that is started before it has imported all waits for it.

    Args:
        environ: environment variables of every job in addition to those of this process: its number of threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(JOB_IMPORTS, {**os.environ, **environ, "PYTHONUNBUFFERED": "1"})

    def __call__(self, job: JobCommand) -> JobProcess:
        """Start a job."""
        return started_in(WorkerGroup(job.number, job.report, fork=self.fork), job)

    def share(self, data: Mapping[str, Any]) -> None:
        """Share a dataset between all later jobs if it can be shared; otherwise each job reads its own."""
        self.broadcast({"data": dict(data)})


class SharedWarmStarter(contextlib.ExitStack):
    """Lets all sweeps of the block start jobs from one preloaded process, which the first that needs it starts."""

    _starter: WarmStarter | None = None

    def __enter__(self) -> Self:
        """Begin the block."""
        self.callback(_SHARED.reset, _SHARED.set(self))
        return self

    def get(self, environ: Mapping[str, str]) -> WarmStarter:
        """Return the starter, of a new process if there is none that lives."""
        if self._starter is None or not self._starter.is_alive:
            self._starter = self.enter_context(WarmStarter(environ))
        return self._starter


_SHARED: Final[ContextVar[SharedWarmStarter | None]] = ContextVar("shared", default=None)


class Launching:
    """Composes jobs and runs them, for the duration of a sweep.

    Raises:
        ConfigError: this machine does not have the requested slots.
    """

    runs_here: ClassVar[bool] = True
    """Whether jobs are processes of this machine."""

    def __init__(self, *, hydra_context: HydraContext, config: DictConfig) -> None:
        self._loader: Any = hydra_context.config_loader
        self._config = config
        self.settings: Settings = _run_config(config).sweep
        """`sweep.*` as given."""
        self._folder = _folder_of(config, self.settings)
        with open_dict(config):
            config.hydra.sweep.dir = str(self._folder)  # the sweeper writes into it too
        self._jobs: dict[str, SweepJob] = {}
        self._warm: WarmStarter | None = None
        self._has_shared = False

    @cached_property
    def sweep(self) -> Sweep:
        """The sweep that runs the jobs; created for the first job, because it queries torch for GPUs."""
        return Sweep(
            folder=self._folder,
            slots=self._slots,
            retries=self.settings.retries,
            on_error=self.settings.on_error,
            command=tuple(map(redacted_argument, sys.argv[1:])),
            budget=Budget.of(_run_config(self._config), on_gpus=self._slots.on_gpus) if self.runs_here else None,
        )

    @cached_property
    def _slots(self) -> Slots:
        return self._make_slots()

    def _make_slots(self) -> Slots:
        return Slots.here(self.settings)

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Compose all jobs of a batch, run them, and show the leaderboard so far.

        Returns:
            One `JobReturn` per job, with its exit code: a failed job does not end the search.
        """
        setup_globals()
        with self._warmed(len(job_overrides)):
            composed = [self.job(line, first + index) for index, line in enumerate(job_overrides)]
            jobs: dict[str, SweepJob] = {}
            for job in composed:
                if job.name in jobs:
                    print_line(f"{job.label or 'the point'}: equals job {job.name}, which runs only once")
                jobs[job.name] = job
            self.sweep.expect(jobs.values())
            self.run(JobList(jobs.values()))
        codes = self.sweep.exit_codes
        return [job_return(job.overrides, codes.get(job.name)) for job in composed]

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source, and show the leaderboard.

        Raises:
            StoppedError, TerminatedError: a signal ended the sweep early.
        """
        with self._warmed(source.total):
            try:
                self.sweep.run(source)
            finally:
                self.sweep.finish()

    @contextlib.contextmanager
    def _warmed(self, total: int | None) -> Iterator[None]:
        """Start jobs as forks of a preloaded process while the block runs, where this is possible and saves time."""
        unused, shared = not self.runs_here or self._warm is not None, _SHARED.get()
        alone = total == 1 and shared is None
        if unused or alone or self.sweep.slots.on_gpus or not WarmStarter.is_possible():
            yield
            return
        threads = self.sweep.slots.threads
        with WarmStarter(threads) if shared is None else contextlib.nullcontext(shared.get(threads)) as self._warm:
            self.sweep.start = self._warm
            yield
        self._warm, self.sweep.start = None, start_fresh

    def job(self, overrides: Sequence[str], number: int) -> SweepJob:
        """Return the job of one point.

        Args:
            overrides: the arguments of the point.
            number: number of the job in the sweep and name of its folder, unless a job of this folder has the same
                config.

        Raises:
            ConfigError: the config has problems, or needs more slots than there are.
        """
        try:
            config = self._loader.load_sweep_config(self._config, list(overrides))
        except ConfigError as error:  # a point that a search has chosen
            label = self._label(overrides)
            raise ConfigError(
                replace(problem, rule=f"{problem.rule} In the point {label}.") for problem in error.problems
            ) from error
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # `hydra.sweep.subdir` refers to the job's number
        cfg = _run_config(config)
        if self._warm is not None and not self._has_shared:  # usually the dataset of the first job is that of all
            self._has_shared = True
            self._warm.share(cfg.data)
        key = identity(cfg)
        twin = self._jobs.get(key)
        name, folder = (twin.name, twin.folder) if twin is not None else self._name_and_folder(config, key)
        command = self._loader.command([*overrides, *self._loader.hydra_arguments], folder)
        strategy = build(cfg.strategy, "strategy")
        job = SweepJob(
            name=name,
            folder=folder,
            overrides=tuple(overrides),
            command=command,
            slots=self._slots_of(strategy),
            config=key,
            label=self._label(overrides),
        )
        slots = self.sweep.slots
        problems = slots.problems(job.label, job.slots)
        if slots.on_gpus and not problems:
            problems = numbering_problems(strategy, num_gpus=slots.count, job_gpus=job.slots)
        if problems:
            raise ConfigError(problems)
        self._jobs[key] = job
        return job

    def _name_and_folder(self, config: DictConfig, key: str) -> tuple[str, Path]:
        """Return name and folder of a job; a job of an earlier sweep in this folder keeps its own."""
        row = self.sweep.record.of(key)
        if row is not None:
            return row.job, row.folder
        used = [job.folder for job in self._jobs.values()] + [row.folder for row in self.sweep.record.rows.values()]
        preferred = self.sweep.folder / _subfolder(str(OmegaConf.select(config, "hydra.sweep.subdir")))
        folder = free_name(preferred, used)
        return folder.relative_to(self.sweep.folder).as_posix(), folder

    def _slots_of(self, strategy: Strategy) -> int:
        slots = self.sweep.slots
        return strategy.num_slots(slots.count if slots.on_gpus else 0)

    def _label(self, overrides: Sequence[str]) -> str:
        # as it was given: ${seed} stays
        fixed: Any = OmegaConf.to_container(self._config.hydra.overrides.task, resolve=False)
        return " ".join(line for line in overrides if line not in fixed)


def _subfolder(text: str) -> str:
    """Check the folder of a job, which must be below that of the sweep.

    Raises:
        ConfigError: it is not below the sweep's folder, or no file system accepts it.
    """
    rule = path_rule(text)
    if ".." in Path(text).parts or Path(text).is_absolute() or not Path(text).parts:
        rule = "is outside the folder of the sweep, which holds all jobs. Give a path below it."
    if rule is not None:
        raise ConfigError([Problem(key="hydra.sweep.subdir", value=text, rule=rule, origin=COMMAND_LINE)])
    return text


def _folder_of(config: DictConfig, settings: Settings) -> Path:
    """Return the folder of the sweep: the given one, or a new one."""
    folder = Path(str(config.hydra.sweep.dir))
    if rule := path_rule(str(folder)):
        raise ConfigError([Problem(key="hydra.sweep.dir", value=str(folder), rule=rule, origin=COMMAND_LINE)])
    if settings.resume is not None and not (folder / SWEEP_FILE).is_file():
        rule = f"is not the folder of a sweep: it has no {SWEEP_FILE}."
        raise ConfigError([Problem(key="sweep.resume", value=settings.resume, rule=rule, origin=COMMAND_LINE)])
    fixed = settings.resume or settings.name or any("hydra.sweep.dir" in line for line in config.hydra.overrides.hydra)
    return folder if fixed else free_name(folder)


def _run_config(config: DictConfig) -> RunConfig:
    values = {name: value for name, value in config.items() if name != "hydra"}
    plain = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    return RunConfig.from_dict(plain)  # type: ignore[arg-type]


def numbering_problems(strategy: Strategy, *, num_gpus: int, job_gpus: int) -> list[Problem]:
    """Return problems of a strategy that arise only on the job's own GPUs: devices that it names by number."""
    from trainkit.strategies.base import PlanContext  # noqa: PLC0415 - imports torch

    keys = {problem.key for problem in strategy.validate(PlanContext(num_gpus=num_gpus))}
    return [
        replace(problem, rule=f"{problem.rule} A job of a sweep sees only its own GPUs, numbered from 0.")
        for problem in strategy.validate(PlanContext(num_gpus=job_gpus))
        if problem.key not in keys
    ]


def identity(cfg: RunConfig) -> str:
    """Return a hash that is equal for two configs if the result of one can stand for the other's.

    `name`, keys of logging and saving, and keys about the sweep as a whole do not count. Placement and speed do count,
    unlike in the fingerprint: a sweep over strategies has separate points. Secrets do not count.

    Example:
        >>> first, second = RunConfig(name="a"), RunConfig(name="b", log_every_steps=3)
        >>> identity(first) == identity(second) != identity(RunConfig(seed=1))
        True
    """
    counted = {
        dotted(path): int(value) if isinstance(value, float) and value.is_integer() else value
        for path, value in leaves(cfg.to_dict())
        if variable_of(value) is None and path[0] != "sweep" and tag_of(cfg, path).tag is not Tag.cosmetic
    }
    text = json.dumps(counted, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
