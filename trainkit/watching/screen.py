"""Show the runs below a folder in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trainkit.report.numbers import clock, compact, count, figure, share
from trainkit.report.tables import row_lines
from trainkit.watching.board import Watched, WatchedRun

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_HEADER: Final = ("run", "state", "step", "done", "left", "samples/s", "metrics")
_COLOURS: Final = {"running": "green", "starting": "cyan", "finished": "dim", "failed": "red", "killed": "red"}
_REFRESH_S: Final = 2.0
_FEW: Final = 3


def lines_of(watched: Watched) -> list[str]:
    """Return the runs as plain lines."""
    if not watched["runs"]:
        return [f"no runs in {watched['root']}"]
    more = [f"  and {watched['not_shown']} older ones"] if watched["not_shown"] else []
    return [*row_lines(_HEADER, [_cells(run) for run in watched["runs"]]), *more]


def show(console: Console, read: Callable[[], Watched], *, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the runs until Ctrl-C, read again every two seconds."""
    from rich.live import Live  # noqa: PLC0415 - for a terminal only

    with Live(_table(read()), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            wait(_REFRESH_S)
            live.update(_table(read()), refresh=True)


def _table(watched: Watched) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - for a terminal only
    from rich.text import Text  # noqa: PLC0415

    table = Table(
        title=Text(f"{watched['root']}: {len(watched['runs'])} runs"), title_justify="left", box=None, pad_edge=False
    )
    for name in _HEADER:
        right = name in ("step", "done", "left", "samples/s")
        table.add_column(name, justify="right" if right else "left", overflow="ellipsis", no_wrap=True)
    for run in watched["runs"]:
        style = _COLOURS.get(run["state"], "yellow")
        table.add_row(*(Text(cell, style=style if index == 1 else "") for index, cell in enumerate(_cells(run))))
    return table


def _cells(run: WatchedRun) -> tuple[str, ...]:
    step, last = run["step"], run["last_step"]
    metrics = list(run["metrics"].items())[:_FEW]
    return (
        run["folder"],
        f"{run['state']} ({run['note']})" if run["note"] else run["state"],
        "" if step is None else count(step),
        "" if step is None or not last else share(min(1.0, step / last)),
        "" if run["remaining_s"] is None else clock(run["remaining_s"]),
        "" if run["samples_per_s"] is None else compact(run["samples_per_s"]),
        "  ".join(f"{name} {figure(value)}" for name, value in metrics),
    )
