"""The live progress line: in a terminal, a notebook or a log.

The remaining time of a run is estimated from its steps, evaluations and checkpoints.
"""

from __future__ import annotations

import atexit
import html
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple, Protocol

from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import CheckpointConfig, EvalConfig
from trainkit.data.splits import test_splits, validation_splits
from trainkit.fields import above, cosmetic
from trainkit.files import num_bytes
from trainkit.report.numbers import clock, compact, count, fixed, share
from trainkit.report.tables import is_terminal
from trainkit.report.train_log import open_log, recorded_again, unrecorded
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
    metric_step: int | None = None
    """The step of that evaluation; None: this step."""
    samples_per_s: float | None = None
    data_wait: float | None = None
    """Fraction of the time spent waiting for data, 0 to 1."""
    targets_per_s: float | None = None
    """Throughput in targets of a training whose samples have several targets, such as tokens of a language model."""
    mfu: float | None = None
    """Share of the devices' peak that the operations of the model use."""
    memory: tuple[float, float] | None = None
    """Bytes held by rank 0, now and at the peak."""
    launches: float | None = None
    """Operations that the host starts in a step, of a run that compiles nothing."""
    skipped: int = 0
    """Steps skipped because they were not finite."""
    remaining_s: float = float("inf")

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
        >>> plain_text(Reading(step=1240, num_steps=5800, loss=0.5, samples_per_s=412_000, data_wait=0.03))
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
        >>> reading = Reading(step=10, num_steps=20, loss=0.5, samples_per_s=412_000, data_wait=0.03)
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
        kept = [part for part in parts if part.rank <= rank]
        if _fits([part.short for part in kept], width):
            return [(part.short, part.style) for part in kept]
    return [(part.short, part.style) for part in parts if part.rank == 0]


def _parts(reading: Reading, step: int, *, names_step: bool = False) -> Iterator[_Part]:
    position, metric = f"{count(step)}/{count(reading.num_steps)}", reading.metric
    yield _Part(position, position, "bold", 0)
    if reading.loss is not None:
        yield _Part(loss := f"loss {fixed(reading.loss)}", loss, "cyan", 1)
    if metric is not None:
        named = names_step and reading.metric_step not in (None, reading.step)
        of = f" of step {count(reading.metric_step or 0)}" if named else ""
        value = fixed(metric[1])
        yield _Part(f"{metric[0]} {value}{of}", f"{metric[0].rpartition('/')[2]} {value}", "green", 2)
    if reading.samples_per_s is not None:
        rate = compact(reading.samples_per_s)
        yield _Part(f"{rate} samples/s", f"{rate}/s", "", 4)
    if reading.data_wait is not None:
        wait, style = share(reading.data_wait), "yellow" if reading.data_wait > 0.2 else "dim"
        yield _Part(f"data wait {wait}", f"wait {wait}", style, 5)
    if reading.targets_per_s is not None:
        yield _Part(rate := f"{compact(reading.targets_per_s)} targets/s", rate, "dim", 4)
    if reading.mfu is not None:
        yield _Part(mfu := f"MFU {share(reading.mfu)}", mfu, "dim", 5)
    if reading.memory is not None:
        now, peak = (num_bytes(round(one)) for one in reading.memory)
        yield _Part(f"{now}, peak {peak}", now, "dim", 6)
    if reading.launches is not None:
        launches = f"{count(round(reading.launches))} launches"
        yield _Part(f"{launches} a step", launches, "dim", 7)
    if reading.skipped:
        yield _Part(skipped := f"{count(reading.skipped)} skipped", skipped, "yellow", 1)
    if reading.remaining_s < float("inf"):
        left = clock(reading.remaining_s)
        yield _Part(f"{left} left", left, "magenta", 3)


def _fits(texts: list[str], width: int) -> bool:
    return sum(map(len, texts)) + 2 * (len(texts) - 1) <= width


_EVERY_S: Final = 0.5
"""Seconds between two replacements of the output: each one sends a message to the browser."""
_WIDTH: Final = 200
"""Limit of the characters of the texts: a browser wraps them."""


Display = Callable[..., Any]
"""Shows an object below the cell, and returns a handle to replace it: `IPython.display.display`."""


class LiveHtml:
    """A reading as HTML, and as text for a front end that shows no HTML."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._texts = [text for text, _ in terminal_parts(reading, step=reading.step, width=_WIDTH)]

    def __repr__(self) -> str:
        return "  ".join(self._texts)

    def _repr_html_(self) -> str:
        """Return the bar and the texts beside it, for a notebook."""
        label = f"step {self._reading.step} of {self._reading.num_steps}"
        bar = f"<progress max='1' value='{self._reading.done:.4f}' aria-label='{label}'></progress>"
        cells = "".join(f"<span style='margin-left:1em'>{html.escape(text)}</span>" for text in self._texts)
        return f"<div style='font-variant-numeric:tabular-nums'>{bar}{cells}</div>"


class _Repeated(ABC):
    """A line that is shown again every few seconds."""

    def __init__(self, *, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._due = -float("inf")
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

    @abstractmethod
    def _show(self, reading: Reading) -> None: ...


class NotebookLine(_Repeated):
    """A bar below the cell, replaced twice a second at most."""

    def __init__(self, *, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(every_s=_EVERY_S, clock=clock)
        self._display = display
        self._handle: Any = None

    def _show(self, reading: Reading) -> None:
        if self._handle is None:
            self._handle = self._display(LiveHtml(reading), display_id=True)
        else:
            self._handle.update(LiveHtml(reading))


def display_of_notebook() -> Display | None:
    """Return IPython's `display` if this process is the kernel of a notebook; None elsewhere, also in a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display  # noqa: PLC0415 - the kernel has imported it

    return display


_FORWARD_SHARE: Final = 1 / 3
"""Time of an evaluated sample relative to a training sample: the backward pass takes twice the forward pass."""


def times_due(lengths: Sequence[float], low: int, high: int) -> int:
    """Return how often something is due at `low` <= step < `high`, from step 1 on.

    A step at which two parts are due counts twice.

    Args:
        lengths: the steps between two due ones, of each part; need not be whole numbers.
        low: the first step.
        high: the step after the last.

    Example:
        >>> times_due((4, 2.5), 1, 9)  # 4 and 8; 3, 5 and 8
        5
    """
    first, last = max(low, 1) - 1, max(high, 1) - 1
    return sum(math.floor(last / one + 1e-9) - math.floor(first / one + 1e-9) for one in lengths)


@dataclass(frozen=True, kw_only=True)
class PauseSchedule:
    """The pauses of a run: evaluations and saves."""

    last_step: int
    """The last step of the run."""
    evaluations: tuple[float, ...] = ()
    """Steps between two evaluations: of those by steps, and of those by epochs."""
    saves: tuple[float, ...] = ()
    saves_every_s: float | None = None
    samples_per_step: float = 1.0
    evaluated: int = 0
    """Samples of one evaluation; 0 without evaluation."""
    evaluated_at_end: int = 0
    """Samples of the evaluation after the last step."""

    @classmethod
    def of(cls, run: Run) -> PauseSchedule:
        """Return the pauses of a run, by its config."""
        cfg = run.cfg

        def lengths(of: EvalConfig | CheckpointConfig) -> tuple[float, ...]:
            epochs = None if of.every_epochs is None else of.every_epochs * run.plan.steps_per_epoch
            return tuple(float(one) for one in (of.every_steps, epochs) if one is not None)

        beside = cfg.eval.beside or cfg.strategy.get("evaluator")  # another process evaluates
        sizes = {} if beside else {name: _length(run.datasets[name]) for name in run.datasets}
        evaluated = sum(sizes[name] for name in validation_splits(sizes))
        last_step = run.num_steps if cfg.stop_at_step is None else min(run.num_steps, cfg.stop_at_step)
        watched = (cfg.eval.every_steps, cfg.eval.every_epochs) != (None, None)
        at_end = evaluated + sum(sizes[name] for name in test_splits(sizes))
        return cls(
            last_step=last_step,
            evaluations=lengths(cfg.eval),
            saves=lengths(cfg.checkpoint),
            saves_every_s=cfg.checkpoint.every_s,
            samples_per_step=run.plan.global_size,
            evaluated=evaluated if evaluated and watched else 0,
            evaluated_at_end=at_end if watched or last_step == run.num_steps else 0,
        )

    def due(self, low: int, high: int) -> tuple[int, int]:
        """Return the number of evaluations and of saves without one, with `low` <= step < `high`."""
        evaluations, saves, both = self.evaluations if self.evaluated else (), self.saves, list[float]()
        if len(evaluations) == len(saves) == 1 and evaluations[0].is_integer() and saves[0].is_integer():
            both = [math.lcm(int(evaluations[0]), int(saves[0]))]
        return times_due(evaluations, low, high), times_due(saves, low, high) - times_due(both, low, high)


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


class PlainLine(_Repeated):
    """One line every few seconds, for pipes and log files."""

    def __init__(
        self,
        *,
        every_s: float,
        write: Callable[[str], object] = lambda line: print(line, flush=True),  # noqa: T201 - meant for the terminal
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(every_s=every_s, clock=clock)
        self._write = write

    def _show(self, reading: Reading) -> None:
        self._write(plain_text(reading))


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

    log = open_log()
    return TerminalLine(
        console=Console(file=unrecorded(sys.stdout), highlight=False),
        step_now=step_now,
        log=None if log is None else PlainLine(every_s=every_s, write=lambda line: log.write([line])),
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
