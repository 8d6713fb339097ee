"""Decide by the evaluated metric: end a run that no longer improves, or reduce its learning rate."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from trainkit.config.schema import MonitoredMetric
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, below, maths, unit
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.loop import every_steps_or_epochs


@dataclass
class _Progress:
    best: float | None = None
    waited: int = 0
    """Evaluations since the best."""
    counted: int = 0
    """The step of the last evaluation that counted."""
    cooldown: int = 0
    reductions: list[list[float]] = field(default_factory=list)
    """[step, factor of the updates from this step on], in the order of the steps."""


@dataclass(kw_only=True, eq=False)
class _Monitor(Callback):
    """Counts the evaluations since the best value of `eval.metric`, the same on every rank; resumed runs continue.

    An evaluation counts if `eval.every_steps` or `eval.every_epochs` asks for it: not the one at the end of a run that
    is stopped early, which an uninterrupted run does not have.
    """

    decides_by_figures: ClassVar[bool] = True
    _choice: ClassVar[str]

    _progress: _Progress = field(default_factory=_Progress, init=False, repr=False)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Compare the metric with the best, count, and decide.

        Raises:
            ConfigError: the evaluation of this split has no such metric.
        """
        watched, progress, settings = MonitoredMetric.of(run.cfg.eval), self._progress, run.cfg.eval
        figures = [figure for figure in metrics if figure.startswith(f"{watched.metric.partition('/')[0]}/")]
        if figures and watched.metric not in metrics:
            rule = f"{self._choice} compares this metric, and the evaluation returns {', '.join(figures)}."
            raise ConfigError([Problem(key="eval.metric", value=watched.metric, rule=rule)])
        due = every_steps_or_epochs(lambda: None, settings.every_steps, settings.every_epochs, run.plan.steps_per_epoch)
        if not figures or not any(trigger.next_after(progress.counted) <= run.state.step for trigger in due):
            return
        progress.counted, value, best = run.state.step, metrics[watched.metric], progress.best
        improves = best is None or watched.sign * value < watched.sign * best - self._margin(best)
        if improves and not math.isnan(value):
            progress.best, progress.waited = value, 0
        else:
            progress.waited += 1
        self._decide(run, watched.metric)

    @abstractmethod
    def _margin(self, best: float) -> float:
        """Return the smallest difference to the best value that counts as an improvement."""

    @abstractmethod
    def _decide(self, run: Run, metric: str) -> None:
        """Change the training, if it has waited long enough."""

    def state(self) -> dict[str, Any]:
        """Return the best value, and what was counted since."""
        return asdict(self._progress)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the count."""
        vars(self._progress).update(saved)


@dataclass(kw_only=True, eq=False)
class EarlyStop(_Monitor):
    """Ends the run when `eval.metric` has not improved for several evaluations in a row."""

    _choice: ClassVar[str] = "early_stop"

    patience: Annotated[int, maths, at_least(1), unit("evaluations")] = 5
    """Evaluations without an improvement after which the run ends."""
    min_delta: Annotated[float, maths, at_least(0)] = 0.0
    """Smallest difference to the best value that counts as an improvement."""

    def _margin(self, best: float) -> float:
        return self.min_delta

    def _decide(self, run: Run, metric: str) -> None:
        if self._progress.waited >= self.patience and run.state.step < run.num_steps:
            times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
            run.request_stop(f"{metric} has not improved for {times}")


@dataclass(kw_only=True, eq=False)
class Plateau(_Monitor):
    """Multiplies the learning rate when `eval.metric` has not improved for more than `patience` evaluations in a row.

    The arithmetic is that of torch's `ReduceLROnPlateau`. The rate of the schedule and the warmup is multiplied, of
    every optimizer; the reductions and the counts are in the checkpoint.
    """

    changes_maths: ClassVar[bool] = True
    _choice: ClassVar[str] = "plateau"

    factor: Annotated[float, maths, below(0, 1)] = 0.1
    """Factor on the learning rate at each reduction."""
    patience: Annotated[int, maths, at_least(0), unit("evaluations")] = 10
    """Evaluations without an improvement that are tolerated in a row."""
    threshold: Annotated[float, maths, at_least(0)] = 1e-4
    """Smallest difference to the best value that counts as an improvement."""
    threshold_mode: Annotated[Literal["rel", "abs"], maths] = "rel"
    """rel: `threshold` is a share of the best value; abs: a difference."""
    cooldown: Annotated[int, maths, at_least(0), unit("evaluations")] = 0
    """Evaluations after a reduction that are not counted as without improvement."""
    min_factor: Annotated[float, maths, at_least(0)] = 0.0
    """Smallest product of all reductions."""

    def rate_factor(self, step: int) -> float:
        """Return the factor of the last reduction before an update."""
        return next((factor for since, factor in reversed(self._progress.reductions) if step >= since), 1.0)

    def _margin(self, best: float) -> float:
        return self.threshold * (abs(best) if self.threshold_mode == "rel" else 1.0)

    def _decide(self, run: Run, metric: str) -> None:
        progress, step = self._progress, run.state.step
        if progress.cooldown:
            progress.cooldown, progress.waited = progress.cooldown - 1, 0
        if progress.waited > self.patience:
            before = self.rate_factor(step)
            progress.waited, progress.cooldown = 0, self.cooldown
            if (after := max(before * self.factor, self.min_factor)) < before:
                progress.reductions.append([step, after])
