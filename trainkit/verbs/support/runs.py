"""The runs below a folder and the state of each: `trainkit ls RUNS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from trainkit.report.numbers import count
from trainkit.report.tables import row_lines
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import FILE, RunStatus, read_status

_DEEPEST: Final = 6
_MOST_FOLDERS: Final = 20_000


def list_runs(root: Path) -> int:
    """Print the runs of a folder, the most recently updated first; return the exit code."""
    found = [(path, read_status(RunFolder(path))) for path in runs_below(root)]
    if not found:
        sys.stdout.write(f"no runs in {root}\n")
        return 0
    found.sort(key=lambda item: item[1].updated or 0.0, reverse=True)
    rows = [_row(path, finding) for path, finding in found]
    header = ("run", "state", "step", "checkpoint", "updated", "process")
    sys.stdout.write("\n".join([*row_lines(header, rows), ""]))
    return 0


def runs_below(root: Path) -> Iterator[Path]:
    """Yield the run folders at or below a folder, without following links."""
    for looked_at, (place, names, files) in enumerate(os.walk(root), start=1):
        path = Path(place)
        if "resolved.yaml" in files or FILE in files:
            yield path
            names.clear()
        elif len(path.relative_to(root).parts) >= _DEEPEST or looked_at >= _MOST_FOLDERS:
            names.clear()
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def _row(path: Path, found: RunStatus) -> tuple[str, ...]:
    note = f" ({found.note})" if found.note else ""
    step = "" if found.step is None else count(found.step)
    name = "".join(letter if letter.isprintable() else "?" for letter in str(path))
    return name, found.state, step, "yes" if found.resumable else "no", _when(found.updated), f"{found.where}{note}"


def _when(moment: float | None) -> str:
    try:
        return "" if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # not a date
        return ""
