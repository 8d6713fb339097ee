"""The table before the first step, and the lines after the last.

Both exist as plain lines (piped output, log files) and in colour through rich, which is only imported for a terminal.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from trainkit.files import num_bytes
from trainkit.report.numbers import duration, figure

if TYPE_CHECKING:
    from rich.console import Console

Styled = list[list[tuple[str, str]]]
"""Lines, each of parts: a style of rich, and a text."""


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def terminal_console() -> Console | None:
    """Return a rich console on standard output, or None if it is piped."""
    if not is_terminal():
        return None
    from rich.console import Console  # noqa: PLC0415 - costs 25 ms, which piped output need not pay

    return Console(highlight=False)


def print_summary(title: str, rows: Mapping[str, object], *, notes: Sequence[str] = ()) -> None:
    """Print the effective values of a run before its first step.

    Args:
        title: one line above the table, the run's name and folder.
        rows: label -> value, in the order shown. A value of None is left out.
        notes: notes for the user before the training starts, one sentence each.
    """
    shown = {label: str(value) for label, value in rows.items() if value is not None}
    _print([[("bold", title)], *_labelled(shown), *([("yellow", f"  note: {note}")] for note in notes)])


def _labelled(rows: Mapping[str, str]) -> Styled:
    width = max(map(len, rows), default=0)
    return [[("dim", f"  {label:{width}}  "), ("", value)] for label, value in rows.items()]


def _print(lines: Styled) -> None:
    console = terminal_console()
    if console is None:
        text = "\n".join("".join(part for _, part in parts) for parts in lines)
        print(text, flush=True)  # noqa: T201 - meant for the terminal
        return
    from rich.text import Text  # noqa: PLC0415 - for a terminal only

    styled = Text("\n").join(Text.assemble(*((part, style) for style, part in parts)) for parts in lines)
    console.print(styled, soft_wrap=True)  # a command that wraps cannot be copied


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a blank line above it."""
    print("\n".join(["", *row_lines(header, rows)]), flush=True)  # noqa: T201 - meant for the terminal


def row_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table as plain text: numbers aligned right, words left.

    Example:
        >>> row_lines(["stage", "modules"], [["0", "embed, blocks.0-5"], ["1", "head"]])
        ['  stage  modules', '      0  embed, blocks.0-5', '      1  head']
    """
    shown = list(rows)
    columns = list(zip(header, *shown, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    return [
        "  ".join(["", *(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells)]).rstrip()
        for cells in (list(zip(row, widths, right, strict=True)) for row in [header, *shown])
    ]


def print_closing(result: Mapping[str, Any], folder: Path) -> None:
    """Print how a run ended: its result, its folder, and the commands for TensorBoard and to resume.

    Args:
        result: its `result.json`, and what that does not hold: `compile_s`, and whether there is a `page`.
        folder: the run folder, as the user would type it.
    """
    status, steps, seconds = str(result.get("status", "ended")), result.get("steps"), result.get("seconds")
    after = f" after {steps:,} steps" if isinstance(steps, int) else ""
    if seconds is not None:
        # The training time counts all attempts of a resumed run, the total only the last one.
        total = result.get("seconds_total") or 0.0
        after += f", {duration(seconds)} of training{f' ({duration(total)} in all)' if total >= seconds else ''}"
    why = f": {result['reason']}" if result.get("reason") else ""
    colour = {"finished": "green", "failed": "red"}.get(status, "yellow")
    rows = {label: text for label, text in _closing_rows(result, folder) if text}
    _print([[(f"bold {colour}", f"{status}{after}{why}")], *_labelled(rows)])


_RESTARTS: Final = {
    "all": ("restart", "restarts"),
    "lost": ("restart without a replica that was lost", "restarts without replicas that were lost"),
    "returned": ("restart with a replica that returned", "restarts with replicas that returned"),
    "alone": ("task started again alone", "tasks started again alone"),
}


def _closing_rows(result: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    metrics = (result.get("metrics") or {}).items()
    yield "result", "  ".join(f"{name} {figure(value)}" for name, value in metrics if value is not None)
    yield "compiling", f"took {duration(result['compile_s'])}" if result.get("compile_s") else ""
    if skipped := len(result.get("skipped_steps") or ()) + int(result.get("skipped_steps_not_listed", 0)):
        steps = "1 step was" if skipped == 1 else f"{skipped:,} steps were"
        yield "skipped", f"{steps} left out, not finite: skipped_steps in result.json"
    if kinds := [restart.get("kind") for restart in result.get("restarts") or ()]:
        counts = [(kinds.count(kind), words) for kind, words in _RESTARTS.items() if kind in kinds]
        parts = [f"{count:,} {words[count != 1]}" for count, words in counts]
        more = int(result.get("restarts_not_listed", 0))
        yield "restarts", f"{', '.join([*parts, *([f'{more:,} more'] if more else [])])}: restarts in result.json"
    yield "best", str(result.get("best") or "")
    if result.get("model"):
        wrote = f"{num_bytes(result['model_bytes'])} in {duration(result['model_seconds'])}"
        yield "model", f"{Path(result['model']) / 'model.safetensors'}  {wrote}"
    else:
        yield "model", str(result.get("model_note") or "")
    evaluator = result.get("evaluator") or {"status": "finished"}
    unevaluated = evaluator.get("not_evaluated") or ()
    if evaluator.get("status") != "finished" or unevaluated:
        why = f"{': ' * bool(evaluator.get('reason'))}{evaluator.get('reason') or ''}"
        missing = f"; not evaluated, and not considered for best: {', '.join(unevaluated)}" if unevaluated else ""
        yield "evaluator", f"{evaluator.get('status')}{why}{missing}"
    yield "folder", str(folder)
    yield "page", str(folder / "report.html") if result.get("page") else ""
    if (folder / "tensorboard").is_dir():
        yield "tensorboard", f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"
    yield "resume", str(result.get("resume") or "")
