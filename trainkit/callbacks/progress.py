"""The live progress line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trainkit.config.schema import MonitoredMetric
from trainkit.config.values import above
from trainkit.fields import cosmetic
from trainkit.report.live import LiveLine, Pace, Reading, live_line
from trainkit.trainer.events import Callback, Row, Run


@dataclass
class _Shown:
    """State that changes during the run."""

    pace: Pace = field(default_factory=Pace)
    line: LiveLine | None = None
    row: Row = field(default_factory=dict)
    metric: tuple[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Callback):
    """Loss, metric, samples/s, fraction of time waiting for data and time left: a bar on a terminal, else plain lines.

    It appears after the first step, so that importing its renderer does not delay the start.
    """

    observes: ClassVar[bool] = True

    prints: ClassVar[bool] = True

    every_s: Annotated[float, cosmetic, above(0)] = 5.0
    """Seconds between two lines if the output is piped."""
    _shown: _Shown = field(default_factory=_Shown, init=False, repr=False, compare=False)

    def run_start(self, run: Run) -> None:
        """Start to measure the pace."""
        if run.is_owner:
            self._shown.pace.remaining_s(run.state.step, run.num_steps)

    def log(self, run: Run, row: Row) -> None:
        """Show a row."""
        self._shown.row = row
        self._show(run)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Show the metric of an evaluation."""
        name = MonitoredMetric.of(run.cfg.eval).metric
        if name in metrics:
            self._shown.metric = (name, metrics[name])
        self._show(run)

    def rolled_back(self, run: Run, step: int) -> None:
        """Print where the training continues, and measure its pace anew."""
        self._shown.pace = Pace()
        if run.is_owner:
            where = f"the checkpoint of step {run.state.step}"
            print(f"step {step} is not finite: training again from {where}", flush=True)  # noqa: T201 - meant for the terminal
            self._shown.pace.remaining_s(run.state.step, run.num_steps)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the live line before the closing lines."""
        if self._shown.line is not None:
            self._shown.line.close()
            self._shown.line = None

    def _show(self, run: Run) -> None:
        if not run.is_owner:
            return
        shown = self._shown
        if shown.line is None:
            shown.line = live_line(every_s=self.every_s, step_now=lambda: run.state.step)
        shown.line.update(
            Reading(
                step=run.state.step,
                num_steps=run.num_steps,
                loss=shown.row.get("train/loss"),
                metric=shown.metric,
                samples_per_s=shown.row.get("samples_per_s"),
                data_wait=shown.row.get("data_wait"),
                skipped=run.state.skipped,
                remaining_s=shown.pace.remaining_s(run.state.step, run.num_steps),
            )
        )
