"""End a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from trainkit.callbacks.evaluations import counted_value
from trainkit.config.schema import MonitoredMetric
from trainkit.fields import at_least, maths
from trainkit.trainer.events import Callback, Row, Run


@dataclass
class _Seen:
    best: float | None = None
    waited: int = 0
    counted: int = 0
    """The step of the last evaluation that counted."""


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Callback):
    """Ends the run when `eval.metric` has not improved for several evaluations in a row.

    Every rank sees the same metrics, so every rank requests the same stop. A resumed run continues the count; the
    evaluation at the end of a run that is stopped early does not count, unless it was due.
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
        value = counted_value(run, metrics, since=self._seen.counted, callback="early_stop")
        if value is None:
            return
        self._seen.counted = run.state.step
        if self._improves(value, watched.sign):
            self._seen.best, self._seen.waited = value, 0
            return
        self._seen.waited += 1
        if self._seen.waited >= self.patience and run.state.step < run.num_steps:
            times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
            run.request_stop(f"{watched.metric} has not improved for {times}")

    def _improves(self, value: float, sign: float) -> bool:
        """Return whether a value beats the best; NaN never does."""
        if math.isnan(value):
            return False
        return self._seen.best is None or sign * value < sign * self._seen.best - self.min_delta

    def state(self) -> dict[str, Any]:
        """Return the best value, and the number of evaluations since."""
        return asdict(self._seen)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the count."""
        for name, value in saved.items():
            setattr(self._seen, name, value)
