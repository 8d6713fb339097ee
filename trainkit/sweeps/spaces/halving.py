"""Successive halving over checkpoints: all jobs begin, the better part goes on where it stopped, until one is left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainkit.config.grammar import replacing
from trainkit.config.monitored_metric import MonitoredMetric
from trainkit.errors import UnreadableError
from trainkit.reading import read_map
from trainkit.redaction import redacted_argument
from trainkit.sweeps.loop.job_sources import SweepJob
from trainkit.sweeps.results.metric_stream import figure_at

__all__ = ["Halving", "JobOf", "num_rungs", "rung_steps"]


class JobOf(Protocol):
    """Makes a job of a point."""

    def __call__(self, overrides: Sequence[str], number: int, *, going_on: SweepJob | None = None) -> SweepJob:
        """The job.

        Args:
            overrides: its arguments.
            number: of the point.
            going_on: the job whose run it goes on with.
        """


def num_rungs(points: int, reduction: int) -> int:
    """At how many lengths jobs are compared until one is left, that of the whole training included.

    Example:
        >>> [num_rungs(points, 3) for points in (2, 3, 8, 9, 27)]
        [1, 2, 2, 3, 4]
    """
    rungs = 1
    while points >= reduction:
        points, rungs = points // reduction, rungs + 1
    return rungs


def rung_steps(num_steps: int, rung: int, *, rungs: int, reduction: int) -> int | None:
    """Where a job of so many steps stops on a rung; None on the last, which is the whole training.

    Example:
        >>> [rung_steps(100, rung, rungs=3, reduction=3) for rung in range(3)]
        [12, 34, None]
    """
    return None if rung == rungs - 1 else math.ceil(num_steps / reduction ** (rungs - 1 - rung))


class Halving:
    """The jobs of a successive halving, a source of jobs.

    All jobs of a rung end before the best `1 / reduction` of them go on, each in its own folder from its own
    checkpoint, with `stop_at_step` at the next rung: its schedule is that of the whole training throughout. What is
    chosen does not depend on how many run at once, nor on which ends first.

    Args:
        points: the arguments of each.
        lengths: the steps of each one's whole training.
        goal: what the jobs are compared by, as it stands where the rung ends.
        reduction: of so many jobs one goes on.
        rungs: lengths at which they are compared.
        job: makes a job.
        known: jobs of an earlier sweep that this one goes on with, by their arguments.

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
        """Points, each of which is one job however often it goes on."""
        return len(self._points)

    @property
    def exhausted(self) -> bool:
        """Whether the last rung has ended."""
        return self._rung == self._rungs

    def next(self) -> SweepJob | None:
        """The next job of this rung, if one has still to begin."""
        while self._waiting:
            number = self._waiting.popleft()
            job = self._made(number)
            if job.name in self._running or (self._rung == 0 and self._is_twin(number, job)):
                self._contestants.remove(number)  # another spelling of a point that is there already
            elif self._has_been(number, job):
                self._take(number, job)
            else:
                self._running[job.name] = number
                return job
            self._climb()
        return None

    def ended(self, job: SweepJob, code: int) -> None:
        """A job has reached the end of its rung, or failed."""
        number = self._running.pop(job.name)
        if code == 0:
            self._take(number, job)
        self._climb()

    def watch(self, job: SweepJob) -> bool:  # noqa: ARG002 - its rung ends it
        """Never: a job stops by itself."""
        return False

    def _made(self, number: int) -> SweepJob:
        """The job of a point on this rung; it goes on where the point has been before."""
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

    def _is_twin(self, number: int, job: SweepJob) -> bool:
        return any(other.name == job.name for place, other in self._jobs.items() if place != number)

    def _has_been(self, number: int, job: SweepJob) -> bool:
        """Whether the run has come this far already, in the sweep that this one goes on with."""
        result = _json(job.folder / "result.json")
        stop = self._stop(number)
        reached = result.get("steps")
        if result.get("status") == "finished":
            return True
        return stop is not None and isinstance(reached, int) and reached >= stop

    def _take(self, number: int, job: SweepJob) -> None:
        stop = self._stop(number)
        value = figure_at(job.folder / "metrics.jsonl", self._goal.metric, stop)
        if value is not None and math.isfinite(value):
            self._figures[number] = value

    def _climb(self) -> None:
        """Once all of a rung have ended: on to the next, with the best."""
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
