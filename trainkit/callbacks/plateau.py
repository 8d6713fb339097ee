"""Reduce the learning rate when an evaluation no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from trainkit.callbacks.evaluations import counted_value
from trainkit.config.schema import MonitoredMetric
from trainkit.fields import at_least, below, maths
from trainkit.trainer.events import Callback, Row, Run


@dataclass
class _Seen:
    best: float | None = None
    waited: int = 0
    cooldown: int = 0
    counted: int = 0
    """The step of the last evaluation that counted."""
    reductions: list[list[float]] = field(default_factory=list)
    """[step, factor of the updates from this step on], in the order of the steps."""


@dataclass(frozen=True, kw_only=True)
class Plateau(Callback):
    """Multiplies the learning rate when `eval.metric` has not improved for more than `patience` evaluations in a row.

    The arithmetic is that of torch's `ReduceLROnPlateau`. The rate of the schedule and the warmup is multiplied, of
    every optimizer. Every rank sees the same metrics, so every rank takes the same rate; the reductions and the counts
    are in the checkpoint. An evaluation counts if `eval.every_steps` or `eval.every_epochs` asks for it: not the one at
    the end of a run that is stopped early, which an uninterrupted run does not have.
    """

    changes_maths: ClassVar[bool] = True
    decides_by_figures: ClassVar[bool] = True

    factor: Annotated[float, maths, below(0, 1)] = 0.1
    """Factor on the learning rate at each reduction."""
    patience: Annotated[int, maths, at_least(0)] = 10
    """Evaluations without an improvement that are tolerated in a row."""
    threshold: Annotated[float, maths, at_least(0)] = 1e-4
    """Smallest difference to the best value that counts as an improvement."""
    threshold_mode: Annotated[Literal["rel", "abs"], maths] = "rel"
    """rel: `threshold` is a share of the best value; abs: a difference."""
    cooldown: Annotated[int, maths, at_least(0)] = 0
    """Evaluations after a reduction that are not counted as without improvement."""
    min_factor: Annotated[float, maths, at_least(0)] = 0.0
    """Smallest product of all reductions."""
    _seen: _Seen = field(default_factory=_Seen, init=False, repr=False, compare=False)

    def rate_factor(self, step: int) -> float:
        """Return the factor of the last reduction before an update."""
        return next((factor for at, factor in reversed(self._seen.reductions) if step >= at), 1.0)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Compare the metric with the best, and reduce the rate of the updates from here on."""
        seen, watched, step = self._seen, MonitoredMetric.of(run.cfg.eval), run.state.step
        value = counted_value(run, metrics, since=seen.counted, callback="plateau")
        if value is None:
            return
        seen.counted = step
        if self._improves(value, watched.sign):
            seen.best, seen.waited = value, 0
        else:
            seen.waited += 1
        if seen.cooldown:
            seen.cooldown, seen.waited = seen.cooldown - 1, 0
        if seen.waited > self.patience:
            before = self.rate_factor(step)
            seen.waited, seen.cooldown = 0, self.cooldown
            if (after := max(before * self.factor, self.min_factor)) < before:
                seen.reductions.append([step, after])

    def _improves(self, value: float, sign: float) -> bool:
        """Return whether a value beats the best; NaN never does."""
        best = self._seen.best
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        margin = self.threshold * (abs(best) if self.threshold_mode == "rel" else 1.0)
        return sign * value < sign * best - margin

    def state(self) -> dict[str, Any]:
        """Return the counts and the reductions."""
        return asdict(self._seen)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the counts and the reductions."""
        for name, value in saved.items():
            setattr(self._seen, name, value)
