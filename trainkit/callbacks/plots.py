"""Plots of the run, drawn by a separate process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trainkit.config.schema import MonitoredMetric
from trainkit.fields import above, cosmetic
from trainkit.numerics.schedules import lr_points
from trainkit.report.drawing import Drawing, lr_request, metrics_request
from trainkit.trainer.events import Callback, Row, Run

_log = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
"""Enough time to build matplotlib's font cache, which the first plot on a machine does."""


@dataclass
class _Drawn:
    in_progress: list[tuple[str, Drawing]] = field(default_factory=list)
    has_begun: bool = False
    due: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plots(Callback):
    """`plots/lr.png` at the first row of metrics; `plots/loss.png` and one of each metric at intervals, and at the end.

    Each is drawn by a short-lived process: matplotlib would cost the training process 28 MB and 0.3 s. None is started
    before the first row: it would take a core from the start of the training.
    """

    observes: ClassVar[bool] = True

    every_s: Annotated[float, cosmetic, above(0)] = 60.0
    """Seconds between two drawings of the metrics during the run; each occupies another core for half a second."""
    _drawn: _Drawn = field(default_factory=_Drawn, init=False, repr=False, compare=False)

    def log(self, run: Run, row: Row) -> None:
        """Draw the learning rate at the first row."""
        self._begin(run)

    def _begin(self, run: Run) -> None:
        """Draw the learning rate, if that has not been done yet."""
        if not run.is_owner or self._drawn.has_begun:
            return
        self._drawn.has_begun, self._drawn.due = True, time.monotonic() + self.every_s
        rates = {name: lr_points(rate, run.num_steps) for name, rate in (run.rates or {"": run.rate}).items()}
        self._start("lr.png", lr_request(run.folder / "plots/lr.png", title=run.cfg.name, rates=rates))

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Draw the metrics, if a drawing is due."""
        self._begin(run)
        if not run.is_owner or time.monotonic() < self._drawn.due:
            return
        if not any(drawing.running for _, drawing in self._drawn.in_progress):
            self._draw_metrics(run)
        self._drawn.due = time.monotonic() + self.every_s

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Draw the metrics for the last time, and wait for it."""
        if not run.is_owner:
            return
        self._begin(run)
        self._collect()  # the newest drawing of a plot must be written last
        if (run.folder / "metrics.jsonl").exists():
            self._draw_metrics(run)
        self._collect()

    def _draw_metrics(self, run: Run) -> None:
        watched = MonitoredMetric.of(run.cfg.eval)
        metrics, folder = run.folder / "metrics.jsonl", run.folder / "plots"
        self._start(
            "loss.png",
            metrics_request(folder, title=run.cfg.name, metrics=metrics, modes={watched.metric: watched.mode}),
        )

    def _start(self, name: str, request: Mapping[str, Any]) -> None:
        try:
            self._drawn.in_progress.append((name, Drawing(request)))
        except OSError as error:  # a process that cannot be started must not end the training
            _log.warning("plots/%s: %s", name, error)

    def _collect(self) -> None:
        for name, drawing in self._drawn.in_progress:
            if trouble := drawing.wait(_TIMEOUT_S):
                _log.warning("plots/%s: %s", name, trouble)
        self._drawn.in_progress.clear()
