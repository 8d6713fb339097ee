"""Display a running sweep: as a live table in a terminal, or one line per change in a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from trainkit.report.numbers import clock, count, duration, figure, share
from trainkit.report.tables import is_terminal
from trainkit.watching.board import WatchedRun

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

State = Literal["running", "failed", "stopped", "pruned", "done"]

_STYLES: Final[Mapping[State, str]] = {
    "running": "cyan",
    "failed": "red",
    "stopped": "yellow",
    "pruned": "yellow",
    "done": "green",
}
_ROOM_FOR_REST: Final = 6
"""Lines of the terminal that are not available for jobs: the counts, the head of the table, and the command."""


@dataclass(kw_only=True, slots=True)
class JobLine:
    """One job that was started."""

    name: str
    label: str
    """Overrides that distinguish it from the others."""
    state: State = "running"
    progress: WatchedRun | None = None
    """None before the first look."""
    seconds: float | None = None
    """Seconds from its start to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A sweep at one moment."""

    lines: Sequence[JobLine]
    """The jobs that were started, in the order of their starts."""
    queued: int | None
    """Number of jobs that wait for a slot; None if unknown."""
    in_use: int
    """Number of slots in use."""
    slots: int
    """Number of slots."""
    metric: str = "metric"
    """The monitored metric."""

    def counts(self) -> str:
        """Return the counts in words.

        Example:
            >>> View(lines=[JobLine(name="0", label="seed=0")], queued=3, in_use=1, slots=2).counts()
            '1 running, 3 queued, 1 of 2 slots in use'
        """
        states = [line.state for line in self.lines]
        counts = [f"{states.count(state)} {state}" for state in ("done", *_STYLES) if state in states]
        counts = [*dict.fromkeys(counts), *([f"{self.queued} queued"] if self.queued else [])]
        return ", ".join([*counts, f"{self.in_use} of {self.slots} slots in use"])


class Screen:
    """Displays a sweep: one line per change, for pipes and log files."""

    def report(self, text: str, *, transient: bool = False) -> None:  # noqa: ARG002 - no table shows the change
        """Report a change; with `transient`, a table shows the change, and only a display without a table prints it."""
        print_line(text)

    def show(self, view: View) -> None:
        """Show the current state, called a few times a second; here every change was printed when it happened."""

    def close(self) -> None:
        """Release the screen."""


class TableScreen(Screen):
    """A table redrawn in place by a thread of rich; messages appear above it."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live  # noqa: PLC0415 - a terminal only

        self._console = console
        self._view: View | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()
        # A process that is killed cannot restore a hidden cursor.
        console.show_cursor(True)

    def report(self, text: str, *, transient: bool = False) -> None:
        """Print a message above the table."""
        if not transient:
            self._console.print(text, markup=False, soft_wrap=True)

    def show(self, view: View) -> None:
        """Set the state for the next redraw."""
        self._view = view

    def close(self) -> None:
        """Remove the table."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.text import Text  # noqa: PLC0415 - as above

        view = self._view
        return Text("") if view is None else table_of(view, height=self._console.height)


def table_of(view: View, *, height: int) -> RenderableType:
    """Return the table of a view for rich, on a terminal of `height` lines."""
    from rich.console import Group  # noqa: PLC0415 - a terminal only
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown, left_out = _chosen(view.lines, max(1, height - _ROOM_FOR_REST))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("job", "state", "step", view.metric, "loss", "left"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("job", "state") else "right")
    table.add_column("overrides", no_wrap=True, overflow="ellipsis", ratio=1)
    for line in shown:
        name, state, *cells = _cells(line, view.metric)
        table.add_row(name, Text(state, style=_STYLES[line.state]), *cells)
    head = Text(view.counts(), style="bold")
    if left_out:
        head.append(f", {left_out} not shown", style="dim")
    return Group(head, table)


def _chosen(lines: Sequence[JobLine], room: int) -> tuple[list[JobLine], int]:
    """Return the running jobs, the failed jobs and the jobs that ended last, as many as fit, in order."""
    weight = {"running": 0, "failed": 1, "stopped": 2, "pruned": 3, "done": 3}
    indices = sorted(range(len(lines)), key=lambda index: (weight[lines[index].state], -index))[:room]
    return [lines[index] for index in sorted(indices)], len(lines) - len(indices)


def _cells(line: JobLine, goal: str) -> tuple[str, ...]:
    time, progress = "" if line.seconds is None else duration(line.seconds), line.progress
    if progress is None:
        return line.name, line.state, "", "", "", time, line.label
    step, last = progress["step"], progress["last_step"]
    done = "" if step is None or not last else f" {share(min(1.0, step / last)):>5}"
    if line.state == "running":
        time = clock(math.inf if progress["remaining_s"] is None else progress["remaining_s"])
    values = (progress["metrics"].get(name) for name in (goal, "train/loss"))
    metric, loss = ("" if value is None else figure(value) for value in values)
    return line.name, line.state, "" if step is None else count(step) + done, metric, loss, time, line.label


def screen_for() -> Screen:
    """Return the display that suits standard output."""
    if not is_terminal(sys.stdout):
        return Screen()
    from rich.console import Console  # noqa: PLC0415 - a terminal only

    return TableScreen(Console(highlight=False))


TERSE: Final = ContextVar("terse", default=False)
"""Whether the caller of a sweep prints its results, and its end does not."""


def print_line(line: str) -> None:
    """Print a line on the user's screen."""
    print(line, flush=True)  # noqa: T201
