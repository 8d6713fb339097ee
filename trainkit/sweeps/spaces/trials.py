"""Run Optuna's trials as jobs: Optuna proposes points, receives every evaluation, and decides which jobs to prune.

Its state is in `optuna.db` in the sweep's folder, so that a search resumes after a kill, and `optuna-dashboard` and
similar tools can read it. This module imports Optuna: import it only if Optuna was chosen.

Source: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization" (TPE); Li et al. 2020, arXiv:1810.05934
(asynchronous successive halving); Li et al. 2018, arXiv:1603.06560 (Hyperband); Akiba et al. 2019, arXiv:1907.10902
(Optuna).
"""

from __future__ import annotations

import math
import sqlite3
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from trainkit.config.compose.space import Choices, Interval, Space
from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import SweepConfig as Settings
from trainkit.errors import ConfigError, HangupError, Problem, StoppedError, TerminatedError
from trainkit.sweeps.job_sources import SweepJob, pop_fitting
from trainkit.sweeps.results.job_results import STUDY_FILE, MetricRows, read_entry

_STOPPED: Final = (StoppedError.exit_code, TerminatedError.exit_code, HangupError.exit_code)
_MOST_WAITING: Final = 4
"""Points that wait for slots: each is proposed without the results of the jobs that run meanwhile."""
_SEARCH: Final = "trainkit"
"""Attribute of a study: the metric and the ranges of the search."""


@dataclass(kw_only=True)
class _Running:
    trial: optuna.Trial
    rows: MetricRows
    last: int = -1
    """The last reported step; a job resumed after a kill repeats some steps."""
    gave_up: bool = False


class Trials:
    """The jobs of a search by Optuna, as a source of jobs; trials of an earlier search in the study count."""

    def __init__(
        self,
        *,
        study: optuna.Study,
        space: Space,
        trials: int,
        goal: MonitoredMetric,
        job: Callable[[Sequence[str], int], SweepJob],
    ) -> None:
        self._study, self._space, self._trials, self._goal, self._job = study, space, trials, goal, job
        self._distributions = distributions(space)
        self._refuse_another_search()
        begun = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._interrupted = deque(optuna.Trial(study, frozen._trial_id) for frozen in begun)  # noqa: SLF001
        self._running: dict[str, list[_Running]] = {}
        self._waiting: list[SweepJob] = []
        """Jobs of proposed points that did not fit into the free slots."""

    @property
    def total(self) -> int:
        """Total number of trials."""
        return self._trials

    def next(self, free: int) -> SweepJob | None:
        """Return the next point that Optuna proposes, after the points that an earlier sweep left unfinished.

        While one point does not fit into the free slots, another is proposed, so that a gap does not stay empty.
        """
        while (job := pop_fitting(self._waiting, free)) is None and len(self._waiting) < _MOST_WAITING:
            if not self._interrupted and len(self._study.get_trials(deepcopy=False)) >= self._trials:
                break
            self._waiting.append(self._propose())
        return job

    def _propose(self) -> SweepJob:
        trial = self._interrupted.popleft() if self._interrupted else self._study.ask()
        for name, distribution in self._distributions.items():
            # What `ask` does with fixed distributions. A trial whose process was killed between two values keeps those
            # that it has.
            trial._suggest(name, distribution)  # noqa: SLF001
        try:
            job = self._job(self._space.point(_values(self._space, trial.params)), trial.number)
        except ConfigError:
            self._study.tell(trial, state=TrialState.FAIL)  # left open, it would be proposed and refused for ever
            raise
        trial.set_user_attr("job", job.name)
        rows = MetricRows(job.folder / "metrics.jsonl")
        last = max(self._study.get_trials(deepcopy=False)[trial.number].intermediate_values, default=-1)
        self._running.setdefault(job.name, []).append(_Running(trial=trial, rows=rows, last=last))
        return job

    def watch(self, job: SweepJob) -> bool:
        """Return whether the pruner stops a job, by the metrics reported so far."""
        running = self._running[job.name][0]
        if self._report_new(running):
            running.gave_up = running.gave_up or running.trial.should_prune()
        return running.gave_up

    def ended(self, job: SweepJob, code: int) -> None:
        """Report the end of a job to Optuna. A trial that Ctrl-C stopped stays open: a resumed search continues it."""
        twins = self._running[job.name]
        running = twins.pop(0)
        if not twins:
            del self._running[job.name]
        self._report_new(running)
        if code in _STOPPED and not running.gave_up:
            return
        entry = read_entry(job.folder, job=job.name, exit_code=code)
        value = entry.metrics.get(self._goal.metric)
        if code in _STOPPED:
            self._study.tell(running.trial, state=TrialState.PRUNED)
        elif code != 0 or value is None or math.isnan(value):
            self._study.tell(running.trial, state=TrialState.FAIL)
        else:
            self._study.tell(running.trial, value)

    def _refuse_another_search(self) -> None:
        """Refuse a study of other values or another metric, before anything is written into it.

        The study holds the values of a range only as their positions, so the values are kept beside it.
        """
        choices = [axis for axis in self._space.axes if isinstance(axis, Choices) and axis.ordered]
        ranges = {_name(axis): list(map(" ".join, axis.rows)) for axis in choices}
        search = {"metric": self._goal.metric, "mode": self._goal.mode, "ranges": ranges}
        former = {**search, **self._study.user_attrs.get(_SEARCH, {})}
        rule = None
        if (former["metric"], former["mode"]) != (search["metric"], search["mode"]):
            rule = f"contains a search by {former['metric']} ({former['mode']}), and this one is by {search['metric']} "
            rule += f"({search['mode']})."
        for name, distribution in self._distributions.items():
            earlier = [trial.distributions[name] for trial in self._study.get_trials() if name in trial.distributions]
            if any(not _is_compatible(old, distribution) for old in earlier) or (
                ranges.get(name) != former["ranges"].get(name, ranges.get(name)) and earlier
            ):
                rule = f"contains a search over other values of {name}."
        if rule is not None:
            text = f"{rule} Give another name, or the values of that search."
            raise ConfigError([Problem(key="sweep.name", value=self._study.study_name, rule=text)])
        search["ranges"] = {**former["ranges"], **ranges}
        if search != self._study.user_attrs.get(_SEARCH):
            self._study.set_user_attr(_SEARCH, search)

    def _report_new(self, running: _Running) -> bool:
        """Report new values to the trial; return whether there were any."""
        new = [row for row in running.rows.new() if row["step"] > running.last and self._goal.metric in row]
        for row in new:
            value = row[self._goal.metric]
            running.trial.report(math.nan if value is None else value, row["step"])
            running.last = row["step"]
        return bool(new)


def open_study(folder: Path, *, settings: Settings, goal: MonitoredMetric, num_steps: int) -> optuna.Study:
    """Open the study in a sweep's folder, or create one; `num_steps` are those of the longest training, of which
    halving and Hyperband make rungs.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / STUDY_FILE).absolute()
    engine = {"creator": partial(_connection, file)}
    study = optuna.create_study(
        storage=optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs=engine),
        study_name=folder.name,
        direction="maximize" if goal.mode == "max" else "minimize",
        load_if_exists=True,
        pruner=_pruner(settings, num_steps),
    )
    # Use another seed in a resumed search: with the first one it would draw its first points again.
    seed = settings.seed + len(study.get_trials(deepcopy=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # avoid points of running trials
    return study


def _connection(file: Path) -> sqlite3.Connection:
    """Open a connection that does not sync on every report: a kill loses no report, a power failure the last ones."""
    connection = sqlite3.connect(file, check_same_thread=False, timeout=30.0)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _pruner(settings: Settings, num_steps: int) -> optuna.pruners.BasePruner:
    if settings.pruner == "none":
        return optuna.pruners.NopPruner()
    if settings.pruner == "median":
        # The median of fewer than three values is not meaningful; waiting for more than five is too late in a short
        # search.
        startup = max(3, min(5, (settings.trials or 0) // 4))
        return optuna.pruners.MedianPruner(n_startup_trials=startup, n_warmup_steps=settings.min_steps or 0)
    least = settings.min_steps or max(1, num_steps // settings.reduction**3)
    if settings.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=settings.reduction)
    return optuna.pruners.HyperbandPruner(
        min_resource=least, max_resource=max(least, num_steps), reduction_factor=settings.reduction
    )


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return the axes of a space as Optuna's distributions; a range is represented by the ordered indices of its
    values.
    """
    return {_name(axis): _distribution(axis) for axis in space.axes}


def _name(axis: Choices | Interval) -> str:
    return " ".join(key.lstrip("+") for key in axis.keys) if isinstance(axis, Choices) else axis.key.lstrip("+")


def _distribution(axis: Choices | Interval) -> BaseDistribution:
    if isinstance(axis, Interval):
        if axis.whole:
            return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if axis.ordered:
        return IntDistribution(0, len(axis.rows) - 1)
    return CategoricalDistribution(list(map(" ".join, axis.rows)))


def _is_compatible(former: BaseDistribution, distribution: BaseDistribution) -> bool:
    try:
        optuna.distributions.check_distribution_compatibility(former, distribution)
    except ValueError:
        return False
    return True


def _values(space: Space, params: Mapping[str, object]) -> dict[str, str]:
    """Return the text of every key, from the values that Optuna proposes."""
    values: dict[str, str] = {}
    for axis in space.axes:
        value = params[_name(axis)]
        if isinstance(axis, Interval):
            values[axis.key] = axis.text(float(str(value)))
        elif axis.ordered:
            values |= zip(axis.keys, axis.rows[int(str(value))], strict=True)
        else:
            row = next(row for row in axis.rows if " ".join(row) == value)
            values |= zip(axis.keys, row, strict=True)
    return values
