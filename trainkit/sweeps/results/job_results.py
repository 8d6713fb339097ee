"""Read the results of a sweep's jobs, or of all runs below a folder; read and write the `sweep.json` that lists the
jobs.

Seeds and folds are repeats of a point, never candidates: `by_point` makes one result of those of a point.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from trainkit.config.grammar import refusal
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import AbsentFileError, ConfigError, UnreadableError
from trainkit.files import (
    Kind,
    expect_map,
    expect_maps,
    parse_json,
    read_lines,
    read_map,
    read_tail,
    size_of,
    write_atomically,
)
from trainkit.run.folder.run_folder import RunFolder
from trainkit.sweeps.job_sources import SweepJob

NOT_RUN: Final = "not run"
PRUNED: Final = "pruned"
"""Status of a job that a search ended because other jobs were better: neither a failure nor a complete training."""

COMPLETE: Final = ("finished", "stopped")
"""Statuses of a run that has taken all its steps."""

SWEEP_FILE: Final = "sweep.json"
"""File in the folder of a sweep that lists its jobs."""

STUDY_FILE: Final = "optuna.db"
"""File in the folder of a search by Optuna with its state."""

_MAX_BYTES: Final = 256 << 20
"""Size limit of the list of jobs, which has about 500 bytes per job."""
_JOB: Final[Mapping[str, Kind]] = {"job": str, "folder": str, "overrides": list, "exit_code": (int, type(None))}
_OPTIONAL: Final[Mapping[str, Kind]] = {"config": str, "slots": int, "tries": int, "pruned": bool}
_RESULT: Final[Mapping[str, Kind]] = {
    "status": (str, type(None)),
    "reason": (str, type(None)),
    "metrics": (dict, type(None)),
    "seconds": (float, type(None)),
    "steps": (int, type(None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """One job and its result."""

    job: str
    """Number of the job in the sweep, or the name of its folder."""
    status: str
    """finished, pruned, stopped, failed, preempted, hangup, `exit 2` without a result, `not run`, `unreadable`."""
    metrics: Mapping[str, float]
    overrides: tuple[str, ...]
    """The overrides that distinguish it from the other jobs."""
    seconds: float | None
    """Seconds of training alone."""
    folder: Path
    steps: int | None = None
    """Number of updates."""
    arguments: tuple[str, ...] = ()
    """All arguments of its run, as typed."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """For the metrics of several runs, which are means: the standard deviation (of the sample, with n - 1)."""
    runs: tuple[JobResult, ...] = ()
    """The runs of a point that differ in seed or fold alone; empty for a single run."""

    @property
    def settings(self) -> dict[str, str]:
        """The distinguishing overrides as key -> value."""
        return dict(key_value(text) for text in self.overrides)

    def repeats(self, key: str) -> list[str]:
        """Return the values of `seed` or `cv.fold` among the arguments of its runs, each once; the default is empty."""
        arguments = (dict(key_value(text) for text in run.arguments) for run in self.runs or (self,))
        return list(dict.fromkeys(settings.get(key, "") for settings in arguments))

    def by_seed(self, metric: str) -> dict[str, float]:
        """Return the value of each seed that has one; over folds its mean."""
        per_seed: dict[str, list[float]] = {}
        for run in self.runs or (self,):
            if math.isfinite(value := run.metrics.get(metric, math.nan)):
                per_seed.setdefault(run.repeats(SEED)[0], []).append(value)
        return {seed: fmean(values) for seed, values in per_seed.items()}


SEED: Final = "seed"
FOLD: Final = "cv.fold"


def key_value(override: str) -> tuple[str, str]:
    """Split an override into key and value.

    Example:
        >>> key_value("+optimizer.lr=0.1")
        ('optimizer.lr', '0.1')
    """
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def varied_overrides(overrides: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the overrides of each job that not all jobs share.

    Example:
        >>> varied_overrides([["epochs=1", "seed=0"], ["epochs=1", "seed=1"]])
        [('seed=0',), ('seed=1',)]
    """
    common = set.intersection(*(set(job) for job in overrides)) if overrides else set()
    return [tuple(text for text in job if text not in common) for job in overrides]


def config_of(folder: Path) -> RunConfig | None:
    """Return the config of the run in a folder; None if it cannot be read."""
    try:
        return load_resolved(folder / "resolved.yaml")
    except (ConfigError, UnreadableError):
        return None


def first_config(entries: Iterable[JobResult]) -> RunConfig | None:
    """Return the first config of some jobs that can be read; None if there is none."""
    return next((cfg for entry in entries if (cfg := config_of(entry.folder)) is not None), None)


def read_entry(
    folder: Path,
    *,
    job: str,
    overrides: Sequence[str] = (),
    exit_code: int | None = 0,
    arguments: Sequence[str] = (),
    pruned: bool = False,
) -> JobResult:
    """Read one job from the `result.json` in its folder.

    Args:
        folder: the folder of the run.
        job: the name on the leaderboard.
        overrides: the overrides that distinguish the job.
        exit_code: exit code of its process; None if it was not run.
        arguments: all arguments of its run.
        pruned: whether a search stopped it while it ran.
    """
    result: Mapping[str, Any] = {}
    if exit_code is not None:
        try:
            result = read_map(folder / "result.json", {}, optional=_RESULT)
        except AbsentFileError:
            pass
        except UnreadableError:
            result = {"status": "unreadable"}
    figures = result.get("metrics") or {}
    metrics = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    seconds, steps = result.get("seconds"), result.get("steps")
    return JobResult(
        job=job,
        status=PRUNED if pruned and exit_code is not None else _status(result, exit_code),
        metrics=metrics,
        overrides=tuple(overrides),
        seconds=None if seconds is None else float(seconds),
        folder=folder,
        steps=None if steps is None else int(steps),
        arguments=tuple(arguments),
    )


def _status(result: Mapping[str, Any], exit_code: int | None) -> str:
    if exit_code is None:
        return NOT_RUN
    status = str(result.get("status") or "")
    if exit_code != 0 and status in ("", "finished"):
        status = f"exit {exit_code}" if exit_code > 0 else f"signal {-exit_code}"
    return status or "no result"


@dataclass(kw_only=True)
class Row:
    """One job in `sweep.json`."""

    job: str
    folder: Path
    overrides: tuple[str, ...]
    exit_code: int | None = None
    """None if it was not run or has not ended."""
    config: str = ""
    slots: int = 1
    tries: int = 0
    """Number of processes started for it with this config, in this sweep and in the sweeps it resumes."""
    pruned: bool = False
    """Whether the search stopped it early."""


def read_entries(folder: Path) -> list[JobResult]:
    """Return the jobs of a sweep's folder in order, or all runs below any other folder."""
    try:
        rows = read_jobs(folder)
    except AbsentFileError:
        folders = sorted(path.parent for path in folder.rglob("result.json"))
        return [read_entry(run, job=relative(run, folder)) for run in folders]
    labels = varied_overrides([row.overrides for row in rows])
    return [
        replace(
            read_entry(row.folder, job=row.job, overrides=label, exit_code=row.exit_code, pruned=row.pruned),
            arguments=row.overrides,
        )
        for row, label in zip(rows, labels, strict=True)
    ]


def read_jobs(folder: Path) -> list[Row]:
    """Return the jobs that the `sweep.json` of a folder lists; raises as `read_sweep`."""
    return read_sweep(folder)[0]


def read_sweep(folder: Path) -> tuple[list[Row], dict[str, float]]:
    """Return the jobs that the `sweep.json` of a folder lists, and the seconds that they have used of a budget.

    Raises:
        AbsentFileError: there is no such file: the folder does not hold a sweep.
        UnreadableError: the file is damaged, or names a folder outside of the sweep's.
    """
    path = folder / SWEEP_FILE
    try:
        data = read_map(path, {"jobs": list}, optional={"spent": dict}, limit=_MAX_BYTES)
        jobs = expect_maps(data["jobs"], _JOB, optional=_OPTIONAL)
        for job in jobs:
            subfolder = Path(job["folder"])
            if subfolder.is_absolute() or ".." in subfolder.parts:
                raise ValueError(f"its job {job['job'][:40]!a} lies outside the folder of the sweep")
            if not all(isinstance(text, str) for text in job["overrides"]):
                raise ValueError(f"an override of its job {job['job'][:40]!a} is not text")
    except ValueError as error:
        raise UnreadableError(path, str(error)) from None
    fields = [{name: job[name] for name in (*_JOB, *_OPTIONAL) if name in job} for job in jobs]
    rows = [Row(**{**job, "folder": folder / job["folder"], "overrides": tuple(job["overrides"])}) for job in fields]
    return rows, {name: float(value) for name, value in data.get("spent", {}).items() if isinstance(value, int | float)}


def relative(folder: Path, base: Path) -> str:
    """Return a folder relative to another, with forward slashes."""
    return Path(os.path.relpath(folder, base)).as_posix()


def by_point(entries: Iterable[JobResult]) -> list[JobResult]:
    """Combine the runs of a sweep that differ in seed or fold alone into one entry; return other entries unchanged.

    Returns:
        Entries: for a point, the mean of each metric over its finished runs with the sample standard deviation as
        spread, and the sum of the seconds. A point with a failed fold has no metrics: its mean over fewer folds would
        not be comparable.
    """
    points: dict[tuple[str, ...], list[JobResult]] = {}
    for entry in entries:
        point = without_repeats(entry.arguments) if entry.arguments else (str(entry.folder),)
        points.setdefault(point, []).append(entry)
    return [_combine(runs) if len(runs) > 1 else runs[0] for runs in points.values()]


def without_repeats(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments that all runs of a point share.

    Example:
        >>> without_repeats(["cv.folds=5", "cv.fold=0", "seed=3", "optimizer.lr=0.1"])
        ('cv.folds=5', 'optimizer.lr=0.1')
    """
    return tuple(text for text in arguments if key_value(text)[0] not in (SEED, FOLD))


def _combine(runs: Sequence[JobResult]) -> JobResult:
    first, jobs, seconds = runs[0], [run.job for run in runs], [run.seconds for run in runs if run.seconds is not None]
    ended = [run for run in runs if run.status in COMPLETE]
    others = [run.status for run in runs if run.status not in COMPLETE]
    has_folds = len(dict.fromkeys(fold for run in runs for fold in run.repeats(FOLD))) > 1
    counted = [] if has_folds and others else ended
    names = set.intersection(*(set(run.metrics) for run in counted)) if counted else set()
    values = {name: [run.metrics[name] for run in counted] for name in sorted(names)}
    is_range = all(job.isdecimal() for job in jobs) and int(jobs[-1]) - int(jobs[0]) == len(jobs) - 1
    steps = {run.steps for run in ended}
    return JobResult(
        job=f"{jobs[0]}-{jobs[-1]}" if is_range else ",".join(jobs),
        status=f"{len(ended)} of {len(runs)} {'folds' if has_folds else 'runs'}, {others[0]}" if others else "finished",
        metrics={name: fmean(column) for name, column in values.items()},
        spread={name: _spread(column) for name, column in values.items()},
        overrides=without_repeats(first.overrides),
        seconds=sum(seconds) if seconds else None,
        folder=first.folder,
        steps=steps.pop() if len(steps) == 1 else None,
        arguments=without_repeats(first.arguments),
        runs=tuple(runs),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation; NaN for a single value, or if one is not finite."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


@dataclass(kw_only=True)
class SweepState:
    """The rows of a sweep, by the name of the job."""

    folder: Path
    rows: dict[str, Row] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """The command line of the user."""
    budget: str | None = None
    """`sweep.budget`."""
    spent: dict[str, float] = field(default_factory=lambda: {"elapsed_s": 0.0, "device_s": 0.0})
    """Seconds in which a job ran, and seconds of all devices of the jobs, over all starts of the sweep."""

    @classmethod
    def read(cls, folder: Path, *, command: Sequence[str] = (), budget: str | None = None) -> SweepState:
        """Read the state of an earlier sweep in this folder; an empty one if there is none.

        Raises:
            UnreadableError: the file is damaged; without it, every job would be trained again.
            ConfigError: the folder holds a file of the user with the name of a sweep's.
        """
        try:
            rows, spent = read_sweep(folder)
        except AbsentFileError:
            rows, spent = [], {}
            if other := next(folder.glob("leaderboard.*"), None):
                raise refusal(str(other), "was not written by a sweep, which would replace it. Move it.") from None
        state = cls(folder=folder, rows={row.job: row for row in rows}, command=tuple(command), budget=budget)
        state.spent |= {name: spent[name] for name in state.spent if name in spent}
        return state

    def use(self, seconds: float, *, runs: bool, devices: float) -> None:
        """Count seconds in which these devices worked; the clock counts while a job runs."""
        self.spent["elapsed_s"] += seconds * runs
        self.spent["device_s"] += seconds * devices

    def of(self, config: str) -> Row | None:
        """Return the job with this config."""
        return next((row for row in self.rows.values() if config and row.config == config), None)

    def add(self, job: SweepJob) -> Row:
        """Register a job; a known job of this name keeps its results if its config is the same."""
        row = self.rows.get(job.name)
        if row is None or row.config != job.config or not job.config:
            row = Row(job=job.name, folder=job.folder, overrides=job.overrides)
        row.overrides, row.config, row.slots = job.overrides, job.config, job.slots
        self.rows[job.name] = row
        return row

    def forget_others(self, names: set[str]) -> None:
        """Remove jobs of an earlier sweep that have no result and are not part of this one."""
        self.rows = {name: row for name, row in self.rows.items() if name in names or is_complete(row)}

    def write(self) -> None:
        """Write the file atomically: after a crash it is the previous one or this one."""
        rows = [{**asdict(row), "folder": os.path.relpath(row.folder, self.folder)} for row in self.rows.values()]
        used = {} if self.budget is None else {"budget": self.budget, "spent": self.spent}
        content = {"version": 1, "command": list(self.command), **used, "jobs": rows}
        write_atomically(self.folder / SWEEP_FILE, json.dumps(content, indent=2) + "\n")


def is_complete(row: Row) -> bool:
    """Return whether a job reached its last step; its process may have been killed before its end was recorded."""
    if row.pruned or row.exit_code not in (0, None) or not row.tries:
        return False
    result = RunFolder(row.folder).read_result()
    return result is not None and (row.exit_code == 0 or result.get("status") == "finished")


_TAIL_BYTES: Final = 1 << 13


def last_line(log: Path) -> str:
    """Return the last line that a job printed."""
    try:
        lines = read_tail(log, _TAIL_BYTES)[0].decode(errors="replace").split("\n")
    except UnreadableError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class MetricRows:
    """The rows of a `metrics.jsonl`: each call of `new` returns those since the last call.

    The file need not exist yet. A resumed job truncates rows that it writes again: a file that has become shorter is
    read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the new rows; each has a `step`."""
        try:
            if size_of(self._path) < self._offset:
                self._offset = 0
            lines = list(read_lines(self._path, start=self._offset))
        except UnreadableError:
            return []
        self._offset += sum(map(len, lines))
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(expect_map(parse_json(line), {"step": int}))
        return rows
