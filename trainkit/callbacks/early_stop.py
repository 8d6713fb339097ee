"""End a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trainkit.config.schema import MonitoredMetric
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, maths
from trainkit.trainer.events import Callback, Row, Run


@dataclass
class _Seen:
    best: float | None = None
    waited: int = 0


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Callback):
    """Ends the run when `eval.metric` has not improved for several evaluations in a row.

    Every rank sees the same metrics, so every rank requests the same stop. A resumed run continues the count.
    """

    decides_by_figures: ClassVar[bool] = True

    patience: Annotated[int, maths, at_least(1)] = 5
    """Evaluations without an improvement after which the run ends."""
    min_delta: Annotated[float, maths, at_least(0)] = 0.0
    """Smallest difference to the best value that counts as an improvement."""
    _seen: _Seen = field(default_factory=_Seen, init=False, repr=False, compare=False)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Compare the metric with the best, count, and request a stop."""
        watched = MonitoredMetric.of(run.cfg.eval)
        name = watched.metric
        split = name.partition("/")[0]
        figures = [figure for figure in metrics if figure.startswith(f"{split}/")]
        if not figures:
            return  # the evaluation of another split
        if name not in metrics:
            rule = f"early_stop compares this metric, and the evaluation returns {', '.join(figures)}."
            raise ConfigError([Problem(key="eval.metric", value=name, rule=rule)])
        if self._improves(metrics[name], watched.sign):
            self._seen.best, self._seen.waited = metrics[name], 0
            return
        self._seen.waited += 1
        if self._seen.waited >= self.patience and run.state.step < run.num_steps:
            times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
            run.request_stop(f"{name} has not improved for {times}")

    def _improves(self, value: float, sign: float) -> bool:
        """Return whether a value beats the best; NaN never does."""
        if math.isnan(value):
            return False
        return self._seen.best is None or sign * value < sign * self._seen.best - self.min_delta

    def state(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since."""
        return {"best": self._seen.best, "waited": self._seen.waited}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the count."""
        self._seen.best, self._seen.waited = saved["best"], saved["waited"]
