"""`SWEEP/report.html`, the page of a sweep: written at its end, and by `trainkit report SWEEP`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from trainkit.run.page import write_page
from trainkit.sweeps.results.comparing import compare_sweep, wants_page
from trainkit.sweeps.results.leaderboard import Leaderboard

FILE: Final = "report.html"

_log = logging.getLogger(__name__)


def write_sweep_page(folder: Path, board: Leaderboard, path: Path) -> None:
    """Write the page of a sweep; whatever else has its name is renamed.

    Args:
        folder: the folder of the sweep.
        board: its leaderboard.
        path: the file to write.

    Raises:
        OSError: it cannot be written.
        UnreadableError: `sweep.json` cannot be read.
    """
    from trainkit.report.web.comparison_document import comparison_page  # noqa: PLC0415 - for a page only

    write_page(path, comparison_page(compare_sweep(folder, board)))


def page_at_end(folder: Path, board: Leaderboard) -> Path | None:
    """Write the page at the end of a sweep and return its path; None if there is none.

    None is written where `report_page=false` is set, or before any job has begun. A page that cannot be written is a
    warning: the jobs have their results.
    """
    path = folder / FILE
    try:
        if not wants_page(board):
            return None
        write_sweep_page(folder, board, path)
    except Exception as error:  # noqa: BLE001 - whatever it is, the sweep has its results
        _log.warning("%s cannot be written: %s: %s", path, type(error).__name__, error)
        return None
    return path
