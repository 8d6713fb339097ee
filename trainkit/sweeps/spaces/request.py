"""Read the request for a sweep, with the points that are known before the first one runs, and run it."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from trainkit.config.check import check_names
from trainkit.config.check.recipe_keys import fitted
from trainkit.config.compose import Composer
from trainkit.config.compose.space import Choices, Interval, Space
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import MOST_JOBS
from trainkit.config.values import closest
from trainkit.errors import ConfigError, Problem, require_packages
from trainkit.sweeps.job_sources import JobSource, job_return

_SEARCHES: Final = ("random", "optuna")


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A sweep as requested on the command line."""

    sweeper: str
    """The choice of hydra/sweeper."""
    space: Space
    common: Composition
    """The composition of the arguments that all points share."""

    @property
    def points(self) -> list[list[str]]:
        """Arguments of each point; under Optuna, a few points that together contain every value.

        Empty for a sweeper of another package: its points cannot be known in advance.
        """
        trials, seed = self._setting("trials"), self._setting("seed")
        if self.sweeper == "optuna" or (self.sweeper == "random" and None in (trials, seed)):
            return self.space.corners()
        if self.sweeper == "random":
            return sample(self.space, trials=trials, seed=seed)
        return self.space.grid() if self.sweeper in ("grid", "basic") else []

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the request, except those of its points."""
        trials = self._setting("trials")
        if trials is not None and trials > MOST_JOBS:  # before the points are drawn
            yield self.common.problem("sweep.trials", f"must be {MOST_JOBS:,} or less.", value=trials)
            return
        if self.sweeper in _SEARCHES and self.common.values["sweep"].get("trials") is None:
            rule = f"needs the number of points that hydra/sweeper={self.sweeper} tries, sweep.trials=20."
            yield Problem(key="sweep.trials", rule=rule)
        if self.sweeper in _SEARCHES and not self.space.axes:
            yield self._problem("has nothing to search: give a key values, model.width=64,128 or 'seed=interval(0,9)'.")
        if self.sweeper == "basic" and any(len(axis.keys) > 1 for axis in self.space.axes if isinstance(axis, Choices)):
            yield self._problem("does not vary keys together: leave it out, or write hydra/sweeper=grid.")

    def _problem(self, rule: str) -> Problem:
        return Problem(key="hydra/sweeper", value=self.sweeper, rule=rule, origin=COMMAND_LINE)

    def _setting(self, name: str) -> Any:
        """Return a valid key of `sweep`; None for an invalid one, which the check reports."""
        value = self.common.values["sweep"].get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def read_request(composer: Composer, overrides: Sequence[str], *, sweeper: str | None = None) -> SweepRequest:
    """Read the arguments of a sweep; they choose the sweeper unless one is given.

    Raises:
        ConfigError: an argument cannot be parsed or searched, or this sweeper needs another one.
    """
    space = composer.space(overrides)
    common = composer.compose([line for line in space.lines.values() if line], for_others=True)
    request = SweepRequest(sweeper=sweeper or common.sweeper, space=space, common=common)
    if request.sweeper not in (choices := composer.choices_of("hydra/sweeper")):
        near = closest(request.sweeper, choices)
        rule = f"no such choice. {f'Did you mean {near}? ' if near else ''}There are: {', '.join(choices)}."
        raise ConfigError([Problem(key="hydra/sweeper", value=request.sweeper, rule=rule, origin=COMMAND_LINE)])
    if request.sweeper == "optuna":
        require_packages(["optuna"], key="hydra/sweeper=optuna", extra="optuna")
    if problems := list(request.problems()):
        raise ConfigError(problems)
    return request


def sample(space: Space, *, trials: int, seed: int) -> list[list[str]]:
    """Draw the arguments of random points: listed values with equal probability, intervals uniformly, or log-uniformly
    under `log`.

    Every value depends only on the seed, the number of its point and its key: a search with more trials begins with the
    same points, and an additional key does not change the values of the others.

    Example:
        >>> axis = Interval(key="optimizer.lr", low=0.001, high=0.1, log=True)
        >>> space = Space(lines={"optimizer.lr": ""}, axes=(axis,))
        >>> sample(space, trials=3, seed=0)[:2] == sample(space, trials=2, seed=0)
        True

    Source: Bergstra and Bengio 2012, jmlr.org/papers/v13/bergstra12a.html.
    """
    return [_point(space, f"{seed}/{number}") for number in range(trials)]


def _point(space: Space, key: str) -> list[str]:
    values: dict[str, str] = {}
    for axis in space.axes:
        if isinstance(axis, Choices):
            rng = random.Random(f"{key}/{axis.keys[0]}")  # noqa: S311 - a search, no secret
            values |= zip(axis.keys, rng.choice(axis.rows), strict=True)
        else:
            rng = random.Random(f"{key}/{axis.key}")  # noqa: S311 - the same
            values[axis.key] = axis.text(_number(axis, rng.random()))
    return space.point(values)


def _number(axis: Interval, share: float) -> float:
    """Return the number at a fraction of an interval; integers share it equally."""
    low, high = axis.low, axis.high + (1 if axis.whole else 0)
    value = low * (high / low) ** share if axis.log else low + (high - low) * share
    return min(math.floor(value), axis.high) if axis.whole else value


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
    request = read_request(composer, arguments, sweeper=sweeper)
    folder = Path(str(config.hydra.sweep.dir))
    if sweeper in ("grid", "random"):
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, folder / "multirun.yaml")
        return [launcher.launch(request.points, 0)]
    launching = getattr(launcher, "launching", None)
    if launching is None:
        rule = "needs a launcher that reports the progress of its jobs. Use hydra/launcher=slots."
        raise ConfigError([Problem(key="hydra/sweeper", value=sweeper, rule=rule, origin=COMMAND_LINE)])
    setup_globals()
    launching.sweep.requested.update(launching.sweep.record.rows)  # a resumed search includes all of its earlier jobs
    source = _trials(request, composer, launching, folder)
    OmegaConf.save(config, folder / "multirun.yaml")
    launching.run(source)
    done = launching.sweep
    rows = [row for name, row in done.record.rows.items() if name in done.requested]
    # A job that the search pruned counts as a success.
    return [[job_return(row.overrides, 0 if row.pruned else row.exit_code) for row in rows]]


def _trials(request: SweepRequest, composer: Composer, launching: Any, folder: Path) -> JobSource:
    from trainkit.sweeps.spaces.trials import Trials, open_study  # noqa: PLC0415 - imports Optuna

    settings = launching.settings
    goal = MonitoredMetric.of(request.common.cfg.eval)
    num_steps = max(_lengths(composer, request.points), default=1) if settings.pruner in ("halving", "hyperband") else 1
    study = open_study(folder, settings=settings, goal=goal, num_steps=num_steps)
    return Trials(study=study, space=request.space, trials=settings.trials, goal=goal, job=launching.job)


def _lengths(composer: Composer, points: Sequence[Sequence[str]]) -> list[int]:
    """Return the steps for which each point would train."""
    from trainkit.run.planning.notes import plan_all_points  # noqa: PLC0415 - imports torch

    composed = (composer.compose(point, for_others=True) for point in points)
    find = functools.partial(check_names, multirun=True)
    return plan_all_points([fitted(composition, find)[0] for composition in composed])
