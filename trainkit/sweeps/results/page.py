"""Write `SWEEP/report.html`, the page of a sweep, at its end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_page, write_run_page
from trainkit.sweeps.results.comparing import compare_sweep, spreads_of, wants_page
from trainkit.sweeps.results.job_results import read_entries
from trainkit.sweeps.results.leaderboard import Leaderboard

if TYPE_CHECKING:
    from trainkit.report.web.comparison_document import Comparison

FILE: Final = "report.html"

_log = logging.getLogger(__name__)


def page_at_end(folder: Path, board: Leaderboard) -> Path | None:
    """Write the page at the end of a sweep and return its path; None if there is none.

    No page is written with `report_page=false`, or before any job has started. A page that cannot be written is a
    warning: the results of the jobs exist.
    """
    from trainkit.report.web.comparison_document import comparison_page  # noqa: PLC0415 - for a page only

    path = folder / FILE
    try:
        if not wants_page(board):
            return None
        comparison = compare_sweep(folder, board)
        write_page(path, comparison_page(comparison))
    except Exception as error:  # noqa: BLE001 - any error: the results of the sweep exist
        _log.warning("%s cannot be written: %s: %s", path, type(error).__name__, error)
        return None
    _add_spreads(folder, comparison)
    return path


def _add_spreads(folder: Path, comparison: Comparison) -> None:
    """Write the pages of jobs with other seeds again; the rows are those of the comparison."""
    spreads = spreads_of(read_entries(folder), comparison.goal.metric)
    for job in comparison.runs:
        place = Path(job.folder)
        spread, page = spreads.get(place.absolute()), place / FILE
        try:
            if spread is not None and page.is_file():
                write_run_page(RunFolder(place), page, rows=job.rows, spread=spread)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("%s cannot be written: %s: %s", page, type(error).__name__, error)
