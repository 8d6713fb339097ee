"""Estimate the remaining time of a run from its steps, evaluations and checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from trainkit.data.splits import test_splits, validation_splits
from trainkit.trainer.events import Run

_FORWARD_SHARE: Final = 1 / 3
"""Time of an evaluated sample relative to a training sample: the backward pass takes twice the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The interval in steps between two evaluations or saves; each part may be absent."""

    every_steps: int | None = None
    steps_per_period: float | None = None
    """The interval given in epochs, converted to steps; it need not be a whole number."""

    def count(self, low: int, high: int) -> int:
        """Return the number of steps at which it is due, `low` <= step < `high`, from step 1 on.

        A step at which both parts are due counts twice.

        Example:
            >>> Interval(every_steps=4, steps_per_period=2.5).count(1, 9)  # 4 and 8; 3, 5 and 8
            5
        """
        first, last = max(low, 1) - 1, max(high, 1) - 1
        return sum(math.floor(last / one + 1e-9) - math.floor(first / one + 1e-9) for one in self.lengths)

    @property
    def lengths(self) -> list[float]:
        """The number of steps between two due steps, for each part."""
        return [float(one) for one in (self.every_steps, self.steps_per_period) if one is not None]

    def shared_with(self, other: Interval) -> Interval:
        """Return the interval at which both are due, if each has one part in whole steps; else an empty interval."""
        mine, others = self.lengths, other.lengths
        if len(mine) != 1 or len(others) != 1 or not (mine[0].is_integer() and others[0].is_integer()):
            return Interval()
        return Interval(every_steps=math.lcm(int(mine[0]), int(others[0])))


@dataclass(frozen=True, kw_only=True)
class PauseSchedule:
    """The pauses of a run: evaluations and saves."""

    last_step: int
    """The last step of the run."""
    evaluations: Interval = Interval()
    saves: Interval = Interval()
    saves_every_s: float | None = None
    samples_per_step: float = 1.0
    evaluated: int = 0
    """Samples of one evaluation; 0 without evaluation."""
    evaluated_at_end: int = 0
    """Samples of the evaluation after the last step."""

    @classmethod
    def of(cls, run: Run) -> PauseSchedule:
        """Return the pauses of a run, by its config."""
        cfg, per_epoch = run.cfg, run.plan.steps_per_epoch
        beside = cfg.eval.beside or cfg.strategy.get("evaluator")  # another process evaluates
        sizes = {} if beside else {name: _length(run.datasets[name]) for name in run.datasets}
        evaluated = sum(sizes[name] for name in validation_splits(sizes))
        last_step = run.num_steps if cfg.stop_at_step is None else min(run.num_steps, cfg.stop_at_step)
        watched = (cfg.eval.every_steps, cfg.eval.every_epochs) != (None, None)
        at_end = evaluated + sum(sizes[name] for name in test_splits(sizes))
        return cls(
            last_step=last_step,
            evaluations=Interval(
                every_steps=cfg.eval.every_steps, steps_per_period=_steps(cfg.eval.every_epochs, per_epoch)
            ),
            saves=Interval(
                every_steps=cfg.checkpoint.every_steps, steps_per_period=_steps(cfg.checkpoint.every_epochs, per_epoch)
            ),
            saves_every_s=cfg.checkpoint.every_s,
            samples_per_step=run.plan.global_size,
            evaluated=evaluated if evaluated and watched else 0,
            evaluated_at_end=at_end if watched or last_step == run.num_steps else 0,
        )

    def due(self, low: int, high: int) -> tuple[int, int]:
        """Return the number of evaluations and of saves without one, with `low` <= step < `high`."""
        saves = self.saves.count(low, high)
        if not self.evaluated:
            return 0, saves
        both = self.saves.shared_with(self.evaluations).count(low, high)
        return self.evaluations.count(low, high), saves - both


def _steps(epochs: float | None, per_epoch: int) -> float | None:
    return None if epochs is None else epochs * per_epoch


def _length(dataset: object) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:  # a stream
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    step: int
    seconds: float
    """Seconds spent training, without pauses."""
    moment: float
    """The same moment on the clock, with pauses."""


class Pace:
    """Estimates the remaining time from the steps of the last minute and the pauses so far.

    Of a shorter training, the later half counts: the first rows also hold compiling, imports, and the comparison of the
    plan with what was measured.

    A row of metrics contains the training time without pauses; the rest of the elapsed time was spent in pauses.
    Between two rows, an evaluation with the save of a new best model is one pause, and a separate save is another. A
    pause in which neither is due (for example the plan after the first steps) is not expected again. Before the first
    evaluation has ended, its duration is estimated from its number of samples and the time of a training sample.

    Example:
        >>> pace = Pace(PauseSchedule(last_step=100), begun=(0, 0.0, 0.0))
        >>> pace.remaining_s(now=0.0)
        inf
        >>> pace.row(20, 10.0, now=10.0)
        >>> pace.remaining_s(now=10.0), pace.remaining_s(now=15.0)
        (40.0, 35.0)
    """

    def __init__(self, pauses: PauseSchedule, *, begun: tuple[int, float, float], window_s: float = 60.0) -> None:
        """Measure from `begun` on: step, seconds of training, moment on the clock."""
        self._pauses, self._window_s = pauses, window_s
        self._begun = self._last = _Mark(step=begun[0], seconds=begun[1], moment=begun[2])
        self._marks: deque[_Mark] = deque()
        self._first_s = math.inf
        """Seconds of training at the first mark."""
        self._evaluations: list[float] = []
        self._saves: list[float] = []

    def row(self, step: int, seconds: float, *, now: float) -> None:
        """Record the position of a row of metrics; the pauses of that step follow the row."""
        mark, before = _Mark(step=step, seconds=seconds, moment=now), self._last
        paused = max((mark.moment - before.moment) - (mark.seconds - before.seconds), 0.0)
        evaluations, saves = self._pauses.due(before.step, step)
        if evaluations:
            self._evaluations.append(paused / evaluations)
        elif saves:
            self._saves.append(paused / saves)
        elif self._saves_by_time(before, mark):
            self._saves.append(paused)
        if step > self._begun.step and (not self._marks or seconds - self._marks[-1].seconds >= self._window_s / 240):
            self._marks.append(mark)
            self._first_s = min(self._first_s, seconds)
        oldest = seconds - min(self._window_s, (seconds - self._first_s) / 2)
        while len(self._marks) > 2 and self._marks[1].seconds <= oldest:
            self._marks.popleft()
        self._last = mark

    def _saves_by_time(self, before: _Mark, after: _Mark) -> bool:
        every, begun = self._pauses.saves_every_s, self._begun.moment
        return every is not None and (after.moment - begun) // every > (before.moment - begun) // every

    def remaining_s(self, *, now: float) -> float:
        """Return the seconds until the run ends; infinite as long as no step has been timed."""
        last, end = self._last, self._pauses.last_step
        if last.step >= end:
            return 0.0
        # The first row holds the first step, which compiles and allocates: it is never among the steps that are timed.
        base = self._marks[0] if self._marks and self._marks[0].step < last.step else self._begun
        if last.step <= base.step:
            return math.inf
        step_s = (last.seconds - base.seconds) / (last.step - base.step)
        training = (end - last.step) * step_s
        remaining = training + sum(self._pauses_s(training, step_s))
        return max(remaining - (now - last.moment), 0.0)

    def _pauses_s(self, training: float, step_s: float) -> Iterator[float]:
        """Yield the seconds of the evaluations and saves that are left."""
        pauses, expected = self._pauses, _FORWARD_SHARE * step_s / self._pauses.samples_per_step
        evaluations, saves = pauses.due(self._last.step, pauses.last_step)
        one = median_low(self._evaluations) if self._evaluations else expected * pauses.evaluated
        yield evaluations * one
        per_sample = one / pauses.evaluated if pauses.evaluated else expected
        yield per_sample * pauses.evaluated_at_end
        if pauses.saves_every_s is not None:
            saves += int(training // pauses.saves_every_s)
        yield (saves + 1) * (median_low(self._saves) if self._saves else 0.0)
