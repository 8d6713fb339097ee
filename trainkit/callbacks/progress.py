"""The live progress line."""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TextIO

from trainkit.config.schema import MonitoredMetric
from trainkit.config.values import above
from trainkit.fields import cosmetic
from trainkit.report.numbers import clock, compact, count, fixed, share
from trainkit.report.tables import is_terminal
from trainkit.report.train_log import into_log_alone, recorded_again, unrecorded
from trainkit.storage import num_bytes
from trainkit.trainer.events import Callback, Row, Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The values of the live line at one moment; None if unknown."""

    step: int
    num_steps: int
    loss: float | None = None
    """Mean training loss of the latest logged row."""
    metric: tuple[str, float] | None = None
    """Name and value of the latest evaluation."""
    samples_per_s: float | None = None
    data_wait: float | None = None
    """Fraction of the time spent waiting for data, 0 to 1."""
    targets_per_s: float | None = None
    """Of a training whose samples have several targets: tokens of a language model."""
    mfu: float | None = None
    """Share of the devices' peak that the operations of the model use."""
    memory: tuple[float, float] | None = None
    """Bytes held by rank 0, now and at the peak."""
    launches: float | None = None
    """Operations that the host starts in a step."""
    skipped: int = 0
    """Steps skipped because they were not finite."""
    remaining_s: float = float("inf")


class LiveLine(Protocol):
    """The interface of a live line."""

    def update(self, reading: Reading) -> None:
        """Update the latest reading; cheap, drawn at the line's own pace."""

    def close(self) -> None:
        """Show the last reading and restore the terminal."""


class Pace:
    """Estimates the remaining time from the pace of the last minute.

    Example:
        >>> pace = Pace(clock=iter([0.0, 10.0]).__next__)
        >>> pace.remaining_s(0, 100), pace.remaining_s(20, 100)
        (inf, 40.0)
    """

    def __init__(
        self,
        *,
        begun: tuple[float, int] | None = None,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure from the moment and the step of `begun`; None: from the first call of `remaining_s`."""
        self._clock = clock
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque(() if begun is None else (begun,))

    def remaining_s(self, step: int, num_steps: int) -> float:
        """Return the seconds from `step` to `num_steps`; infinite as long as no step has been timed."""
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= self._window_s / 60:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._window_s:
            self._seen.popleft()
        since, first = self._seen[0]
        if step <= first:
            return 0.0 if step >= num_steps else float("inf")
        return (num_steps - step) * (now - since) / (step - first)


def plain_text(reading: Reading) -> str:
    """Return a reading as one line of a log.

    Example:
        >>> plain_text(Reading(step=1240, num_steps=5800, loss=0.5, samples_per_s=412_000, data_wait=0.03))
        'step 1,240/5,800   21 %  loss 0.5000  412 k samples/s  data wait 3 %'
    """
    parts = [f"step {count(reading.step)}/{count(reading.num_steps)}", f"{share(_done(reading)):>5}"]
    if reading.loss is not None:
        parts.append(f"loss {fixed(reading.loss)}")
    if reading.metric is not None:
        parts.append(f"{reading.metric[0]} {fixed(reading.metric[1])}")
    if reading.samples_per_s is not None:
        parts.append(f"{compact(reading.samples_per_s)} samples/s")
    if reading.data_wait is not None:
        parts.append(f"data wait {share(reading.data_wait)}")
    parts += [text for _, text, _ in _measured(reading)]
    if reading.skipped:
        parts.append(f"{count(reading.skipped)} skipped")
    if reading.remaining_s < float("inf"):
        parts.append(f"{clock(reading.remaining_s)} left")
    return "  ".join(parts)


def _measured(reading: Reading) -> Iterator[tuple[str, str, int]]:
    """Yield the short and the long text of each instrument, and how soon a narrow terminal drops it."""
    if reading.targets_per_s is not None:
        rate = compact(reading.targets_per_s)
        yield f"{rate} targets/s", f"{rate} targets/s", 4
    if reading.mfu is not None:
        yield f"MFU {share(reading.mfu)}", f"MFU {share(reading.mfu)}", 5
    if reading.memory is not None:
        now, peak = (num_bytes(round(one)) for one in reading.memory)
        yield now, f"{now}, peak {peak}", 6
    if reading.launches is not None:
        yield f"{count(round(reading.launches))} launches", f"{count(round(reading.launches))} launches a step", 7


def _done(reading: Reading) -> float:
    return reading.step / reading.num_steps if reading.num_steps else 1.0


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
        """Print the reading if a line is due."""
        self._unshown = reading
        now = self._clock()
        if now >= self._due:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _BarPart:
    long: str
    short: str
    style: str
    rank: int
    """How soon a narrow terminal drops it: the highest first, 0 never."""


def terminal_parts(reading: Reading, *, step: int, width: int) -> list[tuple[str, str]]:
    """Return the texts beside the bar with their styles: in full if they fit, else short, else without the least
    important.

    Example:
        >>> reading = Reading(step=10, num_steps=20, loss=0.5, samples_per_s=412_000, data_wait=0.03)
        >>> [text for text, _ in terminal_parts(reading, step=12, width=60)]
        ['12/20', 'loss 0.5000', '412 k samples/s', 'data wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=40)]
        ['12/20', 'loss 0.5000', '412 k/s', 'wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=25)]
        ['12/20', 'loss 0.5000']
    """
    parts = _parts(reading, step)
    if _fits([part.long for part in parts], width):
        return [(part.long, part.style) for part in parts]
    for rank in range(7, 0, -1):
        kept = [part for part in parts if part.rank <= rank]
        if _fits([part.short for part in kept], width):
            return [(part.short, part.style) for part in kept]
    return [(part.short, part.style) for part in parts if part.rank == 0]


def _parts(reading: Reading, step: int) -> list[_BarPart]:
    position = f"{count(step)}/{count(reading.num_steps)}"
    parts = [_BarPart(long=position, short=position, style="bold", rank=0)]
    if reading.loss is not None:
        loss = f"loss {fixed(reading.loss)}"
        parts.append(_BarPart(long=loss, short=loss, style="cyan", rank=1))
    if reading.metric is not None:
        name, value = reading.metric[0], fixed(reading.metric[1])
        short = f"{name.rpartition('/')[2]} {value}"
        parts.append(_BarPart(long=f"{name} {value}", short=short, style="green", rank=2))
    if reading.samples_per_s is not None:
        rate = compact(reading.samples_per_s)
        parts.append(_BarPart(long=f"{rate} samples/s", short=f"{rate}/s", style="", rank=4))
    if reading.data_wait is not None:
        wait, style = share(reading.data_wait), "yellow" if reading.data_wait > 0.2 else "dim"
        parts.append(_BarPart(long=f"data wait {wait}", short=f"wait {wait}", style=style, rank=5))
    for shown, text, rank in _measured(reading):
        parts.append(_BarPart(long=text, short=shown, style="dim", rank=rank))
    if reading.skipped:
        skipped = f"{count(reading.skipped)} skipped"
        parts.append(_BarPart(long=skipped, short=skipped, style="yellow", rank=1))
    if reading.remaining_s < float("inf"):
        left = clock(reading.remaining_s)
        parts.append(_BarPart(long=f"{left} left", short=left, style="magenta", rank=3))
    return parts


def _fits(texts: list[str], width: int) -> bool:
    return sum(map(len, texts)) + 2 * (len(texts) - 1) <= width


def live_line(*, every_s: float, step_now: Callable[[], int]) -> LiveLine:
    """Return the live line for standard output.

    Args:
        every_s: seconds between plain lines; a terminal's bar has its own pace.
        step_now: returns the number of finished steps, called from another thread: a slow step still shows that time
            passes.
    """
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
        self._shown.pace = Pace(begun=(time.monotonic(), run.state.step))
        if run.is_owner:
            where = f"the checkpoint of step {run.state.step}"
            print(f"step {step} is not finite: training again from {where}", flush=True)  # noqa: T201 - meant for the terminal

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the live line before the closing lines."""
        if self._shown.line is not None:
            self._shown.line.close()
            self._shown.line = None

    def _show(self, run: Run) -> None:
        if not run.is_owner:
            return
        shown = self._shown
        if shown.pace is None:
            shown.pace = Pace(begun=(run.begun_moment, run.begun_at))
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
                targets_per_s=shown.row.get("targets_per_s"),
                mfu=shown.row.get("mfu"),
                memory=(shown.row["memory"], shown.row["memory_peak"]) if "memory_peak" in shown.row else None,
                launches=shown.row.get("launches"),
                skipped=run.state.skipped,
                remaining_s=shown.pace.remaining_s(run.state.step, run.num_steps),
            )
        )
