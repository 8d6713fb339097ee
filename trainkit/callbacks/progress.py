"""The live progress line."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO

from trainkit.callbacks.screen.notebook import NotebookLine, display_of_notebook
from trainkit.callbacks.screen.pace import Pace, PauseSchedule
from trainkit.callbacks.screen.reading import LiveLine, Reading, plain_text, terminal_parts
from trainkit.config.schema import MonitoredMetric
from trainkit.fields import above, cosmetic
from trainkit.report.tables import is_terminal
from trainkit.report.train_log import into_log_alone, recorded_again, unrecorded
from trainkit.trainer.events import Callback, Row, Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class PlainLine:
    """One line every few seconds, for pipes and log files."""

    def __init__(
        self, *, every_s: float, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._stream = stream
        self._clock = clock
        self._due = -float("inf")
        self._unshown: Reading | None = None

    def update(self, reading: Reading) -> None:
        """Print the reading if a line is due; that of the last step waits for its evaluation, until `close`."""
        self._unshown = reading
        now = self._clock()
        if now >= self._due and reading.step < reading.num_steps:
            self._due = now + self._every_s
            self._show()

    def close(self) -> None:
        """Print the last reading, if it was not printed yet."""
        self._show()

    def _show(self) -> None:
        if self._unshown is not None:
            print(plain_text(self._unshown), file=self._stream or sys.stdout, flush=True)
            self._unshown = None


class TerminalLine:
    """A bar redrawn in place four times a second by a thread of rich; other output appears above it."""

    def __init__(
        self, *, console: Console, step_now: Callable[[], int] | None = None, log: LiveLine | None = None
    ) -> None:
        from rich.live import Live  # noqa: PLC0415 - only on a terminal, and after the first step

        self._console = console
        self._log = log
        self._step_now = step_now
        self._reading: Reading | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()
        # From now on rich prints all other output above the bar; the log must record it without the bar.
        sys.stdout, sys.stderr = recorded_again(sys.stdout), recorded_again(sys.stderr)
        # A killed process cannot restore a hidden cursor.
        console.show_cursor(True)
        # A run that fails between two hooks must not leave its bar below the traceback.
        atexit.register(self.close)

    def update(self, reading: Reading) -> None:
        """Store the reading for the next redraw, and for the next line of the log."""
        self._reading = reading
        if self._log is not None:
            self._log.update(reading)

    def close(self) -> None:
        """Remove the bar."""
        atexit.unregister(self.close)
        self._live.stop()
        if self._log is not None:
            self._log.close()

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - as above
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        reading = self._reading
        if reading is None:
            return Text("")
        step = reading.step if self._step_now is None else max(reading.step, self._step_now())
        parts = terminal_parts(reading, step=step, width=self._console.width - _BAR_WIDTH - 2)
        text = Text(no_wrap=True, overflow="ellipsis")
        for part, style in parts:
            text.append("  ").append(part, style=style)
        row = Table.grid()
        total = max(1, reading.num_steps)
        bar = ProgressBar(total=total, completed=step, width=_BAR_WIDTH, complete_style="cyan", finished_style="green")
        row.add_row(bar, text)
        return row


_BAR_WIDTH = 12


def live_line(*, every_s: float, step_now: Callable[[], int]) -> LiveLine:
    """Return the live line for standard output.

    Args:
        every_s: seconds between plain lines; the bar of a terminal is redrawn at its own pace.
        step_now: returns the number of finished steps, called from another thread: the bar shows the elapsed time even
            during a slow step.
    """
    if (display := display_of_notebook()) is not None:
        return NotebookLine(display=display)
    if not is_terminal():
        return PlainLine(every_s=every_s)
    from rich.console import Console  # noqa: PLC0415 - as above

    log = into_log_alone()
    return TerminalLine(
        console=Console(file=unrecorded(sys.stdout), highlight=False),
        step_now=step_now,
        log=None if log is None else PlainLine(every_s=every_s, stream=log),
    )


@dataclass
class _Shown:
    """State that changes during the run."""

    pace: Pace | None = None
    line: LiveLine | None = None
    row: Row = field(default_factory=dict)
    metric: tuple[str, float] | None = None
    metric_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Callback):
    """Loss, metric, samples/s, fraction of time waiting for data and time left: a bar on a terminal and in a notebook,
    else plain lines.

    It appears after the first step, so that importing its renderer does not delay the start.
    """

    observes: ClassVar[bool] = True

    prints: ClassVar[bool] = True

    every_s: Annotated[float, cosmetic, above(0)] = 5.0
    """Seconds between two lines if the output is piped."""
    _shown: _Shown = field(default_factory=_Shown, init=False, repr=False, compare=False)

    def log(self, run: Run, row: Row) -> None:
        """Show a row."""
        self._shown.row = row
        self._pace(run).row(int(row["step"]), row.get("seconds", run.state.seconds), now=time.monotonic())
        self._show(run)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Show the metric of an evaluation."""
        name = MonitoredMetric.of(run.cfg.eval).metric
        if name in metrics:
            self._shown.metric = (name, metrics[name])
            self._shown.metric_step = int(metrics.get("step", run.state.step))
        self._show(run)

    def rolled_back(self, run: Run, step: int) -> None:
        """Print where the training continues, and restart the measurement of the pace."""
        self._shown.pace = Pace(PauseSchedule.of(run), begun=(run.state.step, run.state.seconds, time.monotonic()))
        if run.is_owner:
            where = f"the checkpoint of step {run.state.step}"
            print(f"step {step} is not finite: training again from {where}", flush=True)  # noqa: T201 - meant for the terminal

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the live line before the closing lines."""
        if self._shown.line is not None:
            self._shown.line.close()
            self._shown.line = None

    def _pace(self, run: Run) -> Pace:
        if self._shown.pace is None:
            begun = (run.begun_at, run.begun_seconds, run.begun_moment)
            self._shown.pace = Pace(PauseSchedule.of(run), begun=begun)
        return self._shown.pace

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
                metric_step=shown.metric_step,
                samples_per_s=shown.row.get("samples_per_s"),
                data_wait=shown.row.get("data_wait"),
                targets_per_s=shown.row.get("targets_per_s"),
                mfu=shown.row.get("mfu"),
                memory=(shown.row["memory"], shown.row["memory_peak"]) if "memory_peak" in shown.row else None,
                launches=shown.row.get("launches"),
                skipped=run.state.skipped,
                remaining_s=self._pace(run).remaining_s(now=time.monotonic()),
            )
        )
