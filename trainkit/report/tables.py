"""The table before the first step, and the lines after the last.

Both exist as plain lines (piped output, log files) and in colour through rich, which is only imported for a terminal.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    _print(summary_text(title, rows, notes=notes))


def summary_text(title: str, rows: Mapping[str, object], *, notes: Sequence[str] = ()) -> Styled:
    """Return the summary as lines with styles."""
    return [[("bold", title)], *_labelled(_row_texts(rows)), *([("yellow", f"  note: {note}")] for note in notes)]


def summary_lines(title: str, rows: Mapping[str, object], *, notes: Sequence[str] = ()) -> list[str]:
    """Return the summary as plain text.

    Example:
        >>> summary_lines("digits", {"replicas": 1, "steps": "870"}, notes=["No GPU found."])
        ['digits', '  replicas  1', '  steps     870', '  note: No GPU found.']
    """
    return _plain(summary_text(title, rows, notes=notes))


def _labelled(rows: Mapping[str, str]) -> Styled:
    width = max(map(len, rows), default=0)
    return [[("dim", f"  {label:{width}}  "), ("", value)] for label, value in rows.items()]


def _plain(lines: Styled) -> list[str]:
    return ["".join(text for _, text in parts) for parts in lines]


def _print(lines: Styled) -> None:
    console = terminal_console()
    if console is None:
        print("\n".join(_plain(lines)), flush=True)  # noqa: T201 - meant for the terminal
        return
    from rich.text import Text  # noqa: PLC0415 - for a terminal only

    text = Text("\n").join(Text.assemble(*((part, style) for style, part in parts)) for parts in lines)
    console.print(text, soft_wrap=True)  # a command that wraps cannot be copied


def _row_texts(rows: Mapping[str, object]) -> dict[str, str]:
    return {label: str(value) for label, value in rows.items() if value is not None}


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
    """Print how a run ended: its result, folder, the TensorBoard command and the command to resume."""
    _print(closing_text(result, folder))


def closing_text(result: Mapping[str, Any], folder: Path) -> Styled:
    """Return the end of a run, by its `result.json`; the folder is as the user would type it."""
    colour = {"finished": "green", "failed": "red"}.get(str(result.get("status")), "yellow")
    return [[(f"bold {colour}", _verdict(result))], *_labelled(_closing_rows(result, folder))]


def closing_lines(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the end of a run as plain text."""
    return _plain(closing_text(result, folder))


def _verdict(result: Mapping[str, Any]) -> str:
    """Return one line: how the run ended, after how many steps and how long."""
    status, reason, steps = str(result.get("status", "ended")), result.get("reason"), result.get("steps")
    after = f" after {steps:,} steps" if isinstance(steps, int) else ""
    return f"{status}{after}{_time_taken(result)}{f': {reason}' if reason else ''}"


def _time_taken(result: Mapping[str, Any]) -> str:
    training, total = result.get("seconds"), result.get("seconds_total")
    if training is None:
        return ""
    # The training time counts all attempts of a resumed run, the total only the last one.
    in_all = "" if total is None or total < training else f" ({duration(total)} in all)"
    return f", {duration(training)} of training{in_all}"


def _closing_rows(result: Mapping[str, Any], folder: Path) -> dict[str, str]:
    metrics = result.get("metrics") or {}
    rows = {"result": "  ".join(f"{name} {figure(value)}" for name, value in metrics.items() if value is not None)}
    rows["compiling"] = f"took {duration(result['compile_s'])}" if result.get("compile_s") else ""
    rows["skipped"] = _skipped(result)
    rows["restarts"] = _restarts(result)
    rows["best"] = str(result.get("best") or "")
    rows["model"] = _model(result)
    rows["evaluator"] = _evaluator(result)
    rows["folder"] = str(folder)
    if (folder / "tensorboard").is_dir():
        rows["tensorboard"] = f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"
    rows["resume"] = str(result.get("resume") or "")
    return {label: value for label, value in rows.items() if value}


def _model(result: Mapping[str, Any]) -> str:
    """Return the file of the trained model, its size, and how long it took to write it."""
    if not result.get("model"):
        return str(result.get("model_note") or "")
    wrote = f"{num_bytes(result['model_bytes'])} in {result['model_seconds']:.2g} s"
    return f"{Path(result['model']) / 'model.safetensors'}  {wrote}"


_RESTARTS: Final = {
    "all": ("restart", "restarts"),
    "lost": ("restart without a replica that was lost", "restarts without replicas that were lost"),
    "returned": ("restart with a replica that returned", "restarts with replicas that returned"),
    "alone": ("task started again alone", "tasks started again alone"),
}


def _restarts(result: Mapping[str, Any]) -> str:
    """Return how many restarts of each kind there were; empty if there were none."""
    listed = result.get("restarts") or ()
    counts = {kind: sum(one.get("kind") == kind for one in listed) for kind in _RESTARTS}
    parts = [f"{count:,} {_RESTARTS[kind][count != 1]}" for kind, count in counts.items() if count]
    more = int(result.get("restarts_not_listed", 0))
    return f"{', '.join([*parts, *([f'{more:,} more'] if more else [])])}: restarts in result.json" if parts else ""


def _evaluator(result: Mapping[str, Any]) -> str:
    """Return that the evaluator did not finish; empty if it did, or if there is none."""
    found = result.get("evaluator") or {"status": "finished"}
    left = found.get("not_evaluated") or ()
    if found.get("status") == "finished" and not left:
        return ""
    missing = f"; not evaluated, and not considered for best: {', '.join(left)}" if left else ""
    return f"{found.get('status')}{': ' * bool(found.get('reason'))}{found.get('reason') or ''}{missing}"


def _skipped(result: Mapping[str, Any]) -> str:
    """Return how many steps were skipped; empty if none was."""
    listed = result.get("skipped_steps") or ()
    count = len(listed) + int(result.get("skipped_steps_not_listed", 0))
    if not count:
        return ""
    steps = "1 step was" if count == 1 else f"{count:,} steps were"
    return f"{steps} left out, not finite: skipped_steps in result.json"
