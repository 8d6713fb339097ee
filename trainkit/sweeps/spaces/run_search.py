"""Run the points of a sweep with its launcher: a list if all points are known in advance, else a source of jobs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf

from trainkit.config.check import check_names, fitted
from trainkit.config.compose import Composer
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.schema import MonitoredMetric
from trainkit.errors import ConfigError, Problem
from trainkit.sweeps.job_sources import JobSource
from trainkit.sweeps.spaces.request import SweepRequest, read_request


def sweep(sweeper: str, *, launcher: Any, composer: Composer, config: DictConfig, arguments: Sequence[str]) -> Any:
    """Run a sweep to its end.

    Args:
        sweeper: the choice of hydra/sweeper.
        launcher: Hydra's launcher; a search needs one with `launching`, which reports the progress of jobs.
        composer: composes the points.
        config: config of the sweep.
        arguments: the user's arguments, without Hydra's own.

    Returns:
        Batches of `JobReturn`, as Hydra's own sweeper returns them.

    Raises:
        ConfigError: the sweep has problems.
    """
    found = read_request(composer, arguments, sweeper=sweeper)
    folder = Path(str(config.hydra.sweep.dir))
    if sweeper in ("grid", "random"):
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, folder / "multirun.yaml")
        return [launcher.launch(found.points, 0)]
    launching = getattr(launcher, "launching", None)
    if launching is None:
        rule = "needs a launcher that reports the progress of its jobs. Use hydra/launcher=slots."
        raise ConfigError([Problem(key="hydra/sweeper", value=sweeper, rule=rule, origin=COMMAND_LINE)])
    setup_globals()
    launching.sweep.requested.update(launching.sweep.record.rows)  # a resumed search includes all of its earlier jobs
    source = _trials(found, composer, launching, folder)
    OmegaConf.save(config, folder / "multirun.yaml")
    launching.run(source)
    return [_returns(launching.sweep)]


def _trials(found: SweepRequest, composer: Composer, launching: Any, folder: Path) -> JobSource:
    from trainkit.sweeps.spaces.trials import Trials, open_study  # noqa: PLC0415 - imports Optuna

    settings = launching.settings
    goal = MonitoredMetric.of(found.common.cfg.eval)
    num_steps = max(_lengths(composer, found.points), default=1) if settings.pruner in ("halving", "hyperband") else 1
    study = open_study(folder, settings=settings, goal=goal, num_steps=num_steps)
    return Trials(study=study, space=found.space, trials=settings.trials, goal=goal, job=launching.job)


def _lengths(composer: Composer, points: Sequence[Sequence[str]]) -> list[int]:
    """Return the steps for which each point would train."""
    from trainkit.run.planning.plan_all import plan_all_points  # noqa: PLC0415 - imports torch

    composed = (composer.compose(point, for_others=True) for point in points)
    find = functools.partial(check_names, multirun=True)
    return plan_all_points([fitted(composition, find)[0] for composition in composed])


def _returns(done: Any) -> list[JobReturn]:
    """Return the results of the jobs; a job that the search pruned counts as a success."""
    rows = [row for name, row in done.record.rows.items() if name in done.requested]
    return [_returned(row.overrides, 0 if row.pruned else row.exit_code) for row in rows]


def _returned(overrides: Sequence[str], code: int | None) -> JobReturn:
    done = JobReturn()
    done.overrides = list(overrides)
    done.status = JobStatus.COMPLETED
    done.return_value = code
    return done
