"""The live progress line: in a terminal, a notebook or a log."""

from __future__ import annotations

import atexit
import html
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple, Protocol

from trainkit.config.schema import MonitoredMetric
from trainkit.fields import above, cosmetic, unit
from trainkit.files import num_bytes
from trainkit.report.numbers import clock, compact, count, fixed, share
from trainkit.report.tables import is_terminal
from trainkit.report.train_log import open_log, recorded_again, unrecorded
from trainkit.trainer.events import Callback, Row, Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The values of the live line at one moment."""

    step: int
    num_steps: int
    row: Row = field(default_factory=dict)
    """The latest logged row."""
    metric: tuple[str, float] | None = None
    """Name and value of the latest evaluation; None: there was none."""
    metric_step: int | None = None
    """The step of that evaluation; None: this step."""
    skipped: int = 0
    """Steps skipped because they were not finite."""
    remaining_s: float = math.inf

    @property
    def done(self) -> float:
        """The share of the steps that are done, 0 to 1."""
        return self.step / self.num_steps if self.num_steps else 1.0


class LiveLine(Protocol):
    """The interface of a live line."""

    def update(self, reading: Reading) -> None:
        """Update the latest reading; cheap, drawn at the line's own pace."""

    def close(self) -> None:
        """Show the last reading and restore the terminal."""


def plain_text(reading: Reading) -> str:
    """Return a reading as one line of a log.

    Example:
        >>> row = {"train/loss": 0.5, "samples_per_s": 412_000, "data_wait": 0.03}
        >>> plain_text(Reading(step=1240, num_steps=5800, row=row))
        'step 1,240/5,800   21 %  loss 0.5000  412 k samples/s  data wait 3 %'
    """
    position, *parts = (part.long for part in _parts(reading, reading.step, names_step=True))
    return "  ".join([f"step {position}", f"{share(reading.done):>5}", *parts])


class _Part(NamedTuple):
    """A part of the line."""

    long: str
    short: str
    style: str
    rank: int
    """Lower ranks stay longest if there is little room."""


def terminal_parts(reading: Reading, *, step: int, width: int) -> list[tuple[str, str]]:
    """Return the texts beside the bar with their styles: in full if they fit, else short, else without the least
    important.

    Example:
        >>> row = {"train/loss": 0.5, "samples_per_s": 412_000, "data_wait": 0.03}
        >>> reading = Reading(step=10, num_steps=20, row=row)
        >>> [text for text, _ in terminal_parts(reading, step=12, width=60)]
        ['12/20', 'loss 0.5000', '412 k samples/s', 'data wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=40)]
        ['12/20', 'loss 0.5000', '412 k/s', 'wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=25)]
        ['12/20', 'loss 0.5000']
    """
    parts = list(_parts(reading, step))
    if _fits([part.long for part in parts], width):
        return [(part.long, part.style) for part in parts]
    for rank in range(7, 0, -1):
        shown = [part for part in parts if part.rank <= rank]
        if _fits([part.short for part in shown], width):
            return [(part.short, part.style) for part in shown]
    return [(part.short, part.style) for part in parts if part.rank == 0]


def _parts(reading: Reading, step: int, *, names_step: bool = False) -> Iterator[_Part]:
    def same(text: str, style: str, rank: int) -> _Part:
        return _Part(text, text, style, rank)

    row, metric = reading.row, reading.metric
    yield same(f"{count(step)}/{count(reading.num_steps)}", "bold", 0)
    if "train/loss" in row:
        yield same(f"loss {fixed(row['train/loss'])}", "cyan", 1)
    if metric is not None:
        named = names_step and reading.metric_step not in (None, reading.step)
        suffix = f" of step {count(reading.metric_step or 0)}" if named else ""
        value = fixed(metric[1])
        yield _Part(f"{metric[0]} {value}{suffix}", f"{metric[0].rpartition('/')[2]} {value}", "green", 2)
    if "samples_per_s" in row:
        rate = compact(row["samples_per_s"])
        yield _Part(f"{rate} samples/s", f"{rate}/s", "", 4)
    if "data_wait" in row:
        wait, style = share(row["data_wait"]), "yellow" if row["data_wait"] > 0.2 else "dim"
        yield _Part(f"data wait {wait}", f"wait {wait}", style, 5)
    if "targets_per_s" in row:  # of samples with several targets, such as tokens of a language model
        yield same(f"{compact(row['targets_per_s'])} targets/s", "dim", 4)
    if "mfu" in row:
        yield same(f"MFU {share(row['mfu'])}", "dim", 5)
    if "memory_peak" in row:
        used, peak = (num_bytes(round(row[name])) for name in ("memory", "memory_peak"))
        yield _Part(f"{used}, peak {peak}", used, "dim", 6)
    if "launches" in row:
        launches = f"{count(round(row['launches']))} launches"
        yield _Part(f"{launches} a step", launches, "dim", 7)
    if reading.skipped:
        yield same(f"{count(reading.skipped)} skipped", "yellow", 1)
    if reading.remaining_s < math.inf:
        yield same(f"{clock(reading.remaining_s)} left", "magenta", 3)


def _fits(texts: list[str], width: int) -> bool:
    return sum(map(len, texts)) + 2 * (len(texts) - 1) <= width


_EVERY_S: Final = 0.5
"""Seconds between two replacements of the output: each one sends a message to the browser."""
_WIDTH: Final = 200
"""Limit of the characters of the texts: a browser wraps them."""


Display = Callable[..., Any]
"""Shows an object below the cell, and returns a handle to replace it: `IPython.display.display`."""


class RepeatedLine:
    """A line that is shown again every few seconds.

    Args:
        show: shows a reading.
        every_s: seconds between two of them.
    """

    def __init__(
        self, show: Callable[[Reading], object], *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show, self._every_s, self._clock = show, every_s, clock
        self._due = -math.inf
        self._unshown: Reading | None = None

    def update(self, reading: Reading) -> None:
        """Show the reading if a line is due; that of the last step waits for its evaluation, until `close`."""
        self._unshown = reading
        now = self._clock()
        if now >= self._due and reading.step < reading.num_steps:
            self._due = now + self._every_s
            self.close()

    def close(self) -> None:
        """Show the last reading, if it was not shown yet."""
        reading, self._unshown = self._unshown, None
        if reading is not None:
            self._show(reading)


def below_a_cell(display: Display) -> Callable[[Reading], None]:
    """Return a function that shows a reading below the cell of a notebook, in the place of the one before."""
    handles: list[Any] = []

    def show(reading: Reading) -> None:
        if handles:
            handles[0].update(as_html(reading), raw=True)
        else:
            handles.append(display(as_html(reading), raw=True, display_id=True))

    return show


def as_html(reading: Reading) -> dict[str, str]:
    """Return a bar and the texts beside it as HTML, and as text for a front end that shows no HTML."""
    texts = [text for text, _ in terminal_parts(reading, step=reading.step, width=_WIDTH)]
    label = f"step {reading.step} of {reading.num_steps}"
    bar = f"<progress max='1' value='{reading.done:.4f}' aria-label='{label}'></progress>"
    cells = "".join(f"<span style='margin-left:1em'>{html.escape(text)}</span>" for text in texts)
    content = f"<div style='font-variant-numeric:tabular-nums'>{bar}{cells}</div>"
    return {"text/plain": "  ".join(texts), "text/html": content}


def display_of_notebook() -> Display | None:
    """Return IPython's `display` if this process is the kernel of a notebook; None elsewhere, also in a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display  # noqa: PLC0415 - the kernel has imported it

    return display


class Pace:
    """Estimates the remaining time: the remaining steps at the pace of the later half of the run so far.

    The pace is that of the clock: evaluations and saves count as often as they came. The steps of the first row, which
    compile and allocate, count only as long as there is no other row.

    Example:
        >>> pace = Pace(last_step=100, step=0, moment=0.0)
        >>> pace.remaining_s(now=0.0)
        inf
        >>> pace.row(20, now=10.0)
        >>> pace.remaining_s(now=10.0), pace.remaining_s(now=15.0)
        (40.0, 35.0)
    """

    def __init__(self, *, last_step: int, step: int, moment: float) -> None:
        """Measure from a step and its moment on the clock."""
        self._last_step, self._base = last_step, (step, moment)
        self._first_at = math.inf
        self._marks: deque[tuple[int, float]] = deque()

    def row(self, step: int, *, now: float, last_step: int | None = None) -> None:
        """Record the moment of a row of metrics, and the last step where it is now another."""
        self._last_step = last_step or self._last_step
        if not self._marks:
            self._first_at = now
        elif len(self._marks) == 1:
            self._base = self._marks[0]
        if len(self._marks) > 1 and self._marks[-1][1] - self._marks[-2][1] < (now - self._first_at) / 240:
            self._marks.pop()  # too close: a run has any number of rows
        self._marks.append((step, now))
        while len(self._marks) > 2 and self._marks[1][1] <= (self._first_at + now) / 2:
            self._marks.popleft()
            self._base = self._marks[0]

    def remaining_s(self, *, now: float) -> float:
        """Return the seconds until the run ends; infinite as long as no step has been timed."""
        (first, begun), (step, moment) = self._base, self._marks[-1] if self._marks else self._base
        if step >= self._last_step:
            return 0.0
        if step <= first:
            return math.inf
        return max((self._last_step - step) * (moment - begun) / (step - first) - (now - moment), 0.0)


class TerminalLine:
    """A bar redrawn in place four times a second by a thread of rich; other output appears above it."""

    def __init__(self, console: Console, *, step_now: Callable[[], int], log: LiveLine | None = None) -> None:
        from rich.live import Live  # noqa: PLC0415 - only on a terminal, and after the first step

        self._console, self._log, self._step_now = console, log, step_now
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
        step = max(reading.step, self._step_now())
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
        return RepeatedLine(below_a_cell(display), every_s=_EVERY_S)
    if not is_terminal():
        return RepeatedLine(lambda reading: print(plain_text(reading), flush=True), every_s=every_s)  # noqa: T201
    from rich.console import Console  # noqa: PLC0415 - as above

    log = open_log()
    lines = None if log is None else RepeatedLine(lambda reading: log.write([plain_text(reading)]), every_s=every_s)
    return TerminalLine(Console(file=unrecorded(sys.stdout), highlight=False), step_now=step_now, log=lines)


@dataclass(kw_only=True, eq=False)
class Progress(Callback):
    """Loss, metric, samples/s, fraction of time waiting for data and time left: a bar on a terminal and in a notebook,
    else plain lines.

    It appears after the first step, so that importing its renderer does not delay the start.
    """

    observes: ClassVar[bool] = True
    prints: ClassVar[bool] = True

    every_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 5.0
    """Seconds between two lines if the output is piped."""
    _pace: Pace | None = field(default=None, init=False, repr=False)
    _line: LiveLine | None = field(default=None, init=False, repr=False)
    _row: Row = field(default_factory=dict, init=False, repr=False)
    _metric: tuple[str, float] | None = field(default=None, init=False, repr=False)
    _metric_step: int | None = field(default=None, init=False, repr=False)

    def log(self, run: Run, row: Row) -> None:
        """Show a row."""
        self._row = row
        if self._pace is None:
            self._pace = Pace(last_step=_last_step(run), step=run.begun_at, moment=run.begun_moment)
        self._pace.row(int(row["step"]), now=time.monotonic(), last_step=_last_step(run))
        self._show(run)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Show the metric of an evaluation."""
        name = MonitoredMetric.of(run.cfg.eval).metric
        if name in metrics:
            self._metric = (name, metrics[name])
            self._metric_step = int(metrics.get("step", run.state.step))
        self._show(run)

    def rolled_back(self, run: Run, step: int) -> None:
        """Print where the training continues, and restart the measurement of the pace."""
        self._pace = Pace(last_step=_last_step(run), step=run.state.step, moment=time.monotonic())
        if run.is_owner:
            where = f"the checkpoint of step {run.state.step}"
            print(f"step {step} is not finite: training again from {where}", flush=True)  # noqa: T201 - meant for the terminal

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the live line before the closing lines."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _show(self, run: Run) -> None:
        if not run.is_owner:
            return
        if self._line is None:
            self._line = live_line(every_s=self.every_s, step_now=lambda: run.state.step)
        self._line.update(
            Reading(
                step=run.state.step,
                num_steps=run.expected_steps,
                row=self._row,
                metric=self._metric,
                metric_step=self._metric_step,
                skipped=run.state.skipped,
                remaining_s=math.inf if self._pace is None else self._pace.remaining_s(now=time.monotonic()),
            )
        )


def _last_step(run: Run) -> int:
    steps, stop_at = run.expected_steps, run.cfg.stop_at_step
    return steps if stop_at is None else min(steps, stop_at)
