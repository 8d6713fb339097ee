"""Run successive halving over checkpoints: all jobs start, the better ones resume where they stopped, until one
remains.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainkit.config.grammar import replacing
from trainkit.config.schema import MonitoredMetric
from trainkit.errors import UnreadableError
from trainkit.files import read_map
from trainkit.redaction import redacted_argument
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.results.metric_stream import figure_at
from trainkit.sweeps.screen import print_line


class JobOf(Protocol):
    """Creates the job of a point."""

    def __call__(self, overrides: Sequence[str], number: int, *, going_on: SweepJob | None = None) -> SweepJob:
        """Return the job of a point; it continues the run of `going_on`."""


def num_rungs(points: int, reduction: int) -> int:
    """Return the number of rungs until one job remains, including the whole training.

    Example:
        >>> [num_rungs(points, 3) for points in (2, 3, 8, 9, 27)]
        [1, 2, 2, 3, 4]
    """
    rungs = 1
    while points >= reduction:
        points, rungs = points // reduction, rungs + 1
    return rungs


def rung_steps(num_steps: int, rung: int, *, rungs: int, reduction: int) -> int | None:
    """Return the step at which a job of `num_steps` stops on a rung; None on the last, which is the whole training.

    Example:
        >>> [rung_steps(100, rung, rungs=3, reduction=3) for rung in range(3)]
        [12, 34, None]
    """
    return None if rung == rungs - 1 else math.ceil(num_steps / reduction ** (rungs - 1 - rung))


class Halving:
    """The jobs of a successive halving, as a source of jobs.

    All jobs of a rung end before the best `1 / reduction` of them continue, each in its own folder from its own
    checkpoint, with `stop_at_step` at the next rung. The schedule is that of the whole training, of `lengths` steps,
    throughout. The selection does not depend on how many jobs run at once, nor on which ends first. `known` are jobs of
    an earlier sweep that this one resumes, by their arguments.

    Source: Jamieson and Talwalkar 2016, arXiv:1502.07943.
    """

    def __init__(
        self,
        *,
        points: Sequence[Sequence[str]],
        lengths: Sequence[int],
        goal: MonitoredMetric,
        reduction: int,
        rungs: int,
        job: JobOf,
        known: Mapping[tuple[str, ...], SweepJob] | None = None,
    ) -> None:
        self._points = list(dict.fromkeys(tuple(point) for point in points))
        if again := len(points) - len(self._points):
            print_line(f"{again} of {len(points)} points were drawn again: each runs only once")
        steps = dict(zip(map(tuple, points), lengths, strict=True))
        self._lengths = [steps[point] for point in self._points]
        self._goal, self._reduction, self._rungs, self._job = goal, reduction, rungs, job
        self._known = known or {}
        self._jobs: dict[int, SweepJob] = {}
        self._rung = 0
        self._contestants = list(range(len(self._points)))
        self._waiting = deque(self._contestants)
        self._running: dict[str, int] = {}
        self._figures: dict[int, float] = {}

    @property
    def total(self) -> int:
        """Number of points; each is one job, however often it continues."""
        return len(self._points)

    @property
    def exhausted(self) -> bool:
        """Whether the last rung has ended."""
        return self._rung == self._rungs

    def next(self, free: int) -> SweepJob | None:  # noqa: ARG002 - its jobs are alike
        """Return the next job of this rung that has not started."""
        while self._waiting:
            number = self._waiting.popleft()
            job = self._make_job(number)
            if job.name in self._running or (self._rung == 0 and self._is_duplicate(number, job)):
                self._contestants.remove(number)  # another spelling of an existing point
                print_line(f"{job.label or 'the point'}: equals job {job.name}, which runs only once")
            elif self._has_reached_rung(number, job):
                self._record_metric(number, job)
            else:
                self._running[job.name] = number
                return job
            self._next_rung()
        return None

    def ended(self, job: SweepJob, code: int) -> None:
        """Receive the end of a job: it reached the end of its rung, or failed."""
        number = self._running.pop(job.name)
        if code == 0:
            self._record_metric(number, job)
        self._next_rung()

    def watch(self, job: SweepJob) -> bool:  # noqa: ARG002 - its rung ends it
        """Return False: a job stops by itself at the end of its rung."""
        return False

    def _make_job(self, number: int) -> SweepJob:
        """Return the job of a point on this rung; it continues the point's earlier run."""
        point = self._points[number]
        stop = self._stop(number)
        shown = tuple(map(redacted_argument, point))
        former = self._jobs.get(number) or self._known.get(shown)
        lines = point if stop is None else replacing(point, f"stop_at_step={stop}")
        job = replace(self._job(lines, number, going_on=former), overrides=shown)
        self._jobs[number] = job
        return job

    def _stop(self, number: int) -> int | None:
        return rung_steps(self._lengths[number], self._rung, rungs=self._rungs, reduction=self._reduction)

    def _is_duplicate(self, number: int, job: SweepJob) -> bool:
        return any(other.name == job.name for place, other in self._jobs.items() if place != number)

    def _has_reached_rung(self, number: int, job: SweepJob) -> bool:
        """Return whether the run has already reached this rung, in the sweep that this one resumes."""
        result = _json(job.folder / "result.json")
        stop = self._stop(number)
        reached = result.get("steps")
        if result.get("status") == "finished":
            return True
        return stop is not None and isinstance(reached, int) and reached >= stop

    def _record_metric(self, number: int, job: SweepJob) -> None:
        stop = self._stop(number)
        value = figure_at(job.folder / "metrics.jsonl", self._goal.metric, stop)
        if value is not None and math.isfinite(value):
            self._figures[number] = value

    def _next_rung(self) -> None:
        """Move to the next rung with the best jobs, after all jobs of this one have ended."""
        while not self._waiting and not self._running and not self.exhausted:
            ranked = [number for number in self._contestants if number in self._figures]
            ranked.sort(key=lambda number: (self._goal.sign * self._figures[number], number))
            best = ranked[: max(1, len(self._contestants) // self._reduction)]
            self._rung = self._rung + 1 if best else self._rungs
            self._contestants = sorted(best)
            self._figures = {}
            self._waiting = deque(self._contestants if not self.exhausted else ())
            if self._waiting:
                return


def _json(path: Path) -> dict[str, object]:
    try:
        return read_map(path, {}, optional={"status": str, "steps": (int, type(None))})
    except UnreadableError:
        return {}
