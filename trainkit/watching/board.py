"""Find the runs below a folder, and read the state of each; every file may be crafted."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from trainkit.errors import UnreadableError
from trainkit.files import Kind, parse_json, read_map, read_tail
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import FILE, read_status

_DEEPEST: Final = 6
_MOST_FOLDERS: Final = 20_000
_MOST_RUNS: Final = 100
_TAIL: Final = 1 << 16
_MOST_METRICS: Final = 20
_LONGEST: Final = 200
_SEARCH_S: Final = 10.0
"""Seconds between two walks through the folders."""


class WatchedRun(TypedDict):
    """One watched run."""

    folder: str
    """The run folder, relative to the watched folder."""
    name: str
    """Name of the run."""
    state: str
    """`starting`, `running`, `killed`, `silent`, `unknown`, or the status with which the run ended."""
    note: str
    """Note on the state; may be empty."""
    step: int | None
    """Updates done; null if unknown."""
    last_step: int | None
    """Updates after which the run ends; null if unknown."""
    remaining_s: float | None
    """Seconds until its end at the speed of its last row; null if it is not running, or unknown."""
    samples_per_s: float | None
    """Samples per second in its last row."""
    metrics: dict[str, float]
    """The newest training loss and the newest value of each metric of an evaluation."""
    updated: float | None
    """Time of its last sign of life, in seconds since 1970; null if unknown."""


class Watched(TypedDict):
    """The output of `trainkit watch --json`."""

    version: Literal[1]
    """Version of this document."""
    root: str
    """The watched folder."""
    runs: list[WatchedRun]
    """The runs below it, running ones first, then by their last update."""
    not_shown: int
    """Number of runs that are not shown."""


def runs_below(root: Path) -> Iterator[Path]:
    """Yield the run folders at or below a folder, without following links."""
    for number, (folder, names, files) in enumerate(os.walk(root), start=1):
        path = Path(folder)
        if "resolved.yaml" in files or FILE in files:
            yield path
            names.clear()
        elif len(path.relative_to(root).parts) >= _DEEPEST or number >= _MOST_FOLDERS:
            names.clear()
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


@dataclass
class Board:
    """The runs below a folder, read again for each request."""

    root: Path
    """The watched folder."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for the interval between two searches for new runs."""
    _folders: list[Path] = field(default_factory=list, init=False, repr=False)
    _due: float = field(default=-math.inf, init=False, repr=False)

    def read(self) -> Watched:
        """Return the current state of every run."""
        if self.clock() >= self._due:
            self._folders = list(runs_below(self.root))
            self._due = self.clock() + _SEARCH_S
        newest = sorted(self._folders, key=_touched, reverse=True)[:_MOST_RUNS]
        runs = sorted((watched(path, self.root) for path in newest), key=_order)
        hidden = len(self._folders) - len(runs)
        return {"version": 1, "root": _plain(str(self.root)), "runs": runs, "not_shown": hidden}


def watched(folder: Path, root: Path) -> WatchedRun:
    """Return the current state of a run.

    Args:
        folder: the run folder.
        root: the folder that its name is relative to.
    """
    status = read_status(RunFolder(folder))
    row, metrics = _last_rows(folder)
    last_step, remaining, pace = None, None, row.get("seconds", 0.0) / max(1.0, row.get("step", 0.0))
    with suppress(UnreadableError):
        kinds: dict[str, Kind] = {"last_step": (int, type(None)), "stop_after_s": (int, float)}
        end = read_map(folder / FILE, {}, optional=kinds)
        last_step, seconds = end.get("last_step"), end.get("stop_after_s")
        if status.state == "running" and status.step is not None and pace > 0:
            times = [] if last_step is None else [(last_step - status.step) * pace]
            times += [] if seconds is None else [seconds - status.step * pace]
            remaining = max(0.0, min(times)) if times else None
    relative = folder.relative_to(root).as_posix()
    return {
        "folder": _plain(str(folder) if relative == "." else relative),
        "name": _plain(folder.parent.name),
        "state": status.state,
        "note": _plain(status.note),
        "step": status.step,
        "last_step": last_step,
        "remaining_s": remaining,
        "samples_per_s": row.get("samples_per_s") if status.is_running else None,
        "metrics": metrics,
        "updated": status.updated,
    }


def _last_rows(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the last row of the training, and the newest value of each metric at the end of the file."""
    try:
        text, _ = read_tail(folder / "metrics.jsonl", _TAIL)
    except UnreadableError:
        return {}, {}
    last: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for line in text.splitlines():
        row = _numbers(line)
        last = row if "train/loss" in row else last
        metrics |= {_plain(name): value for name, value in row.items() if "/" in name}
    return last, dict(list(metrics.items())[:_MOST_METRICS])


def _numbers(line: bytes) -> dict[str, float]:
    with suppress(ValueError):
        row: Any = parse_json(line)
        if isinstance(row, dict):
            numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
            return {name: float(value) for name, value in numbers.items() if abs(value) < 1e300}
    return {}


def _order(run: WatchedRun) -> tuple[bool, float, str]:
    return run["state"] not in ("starting", "running"), -(run["updated"] or 0.0), run["folder"]


def _touched(folder: Path) -> float:
    with suppress(OSError):
        return (folder / FILE).lstat().st_mtime
    return 0.0


def _plain(text: str) -> str:
    """Return a text without characters that move the cursor or reorder the line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])
