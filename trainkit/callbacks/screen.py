"""The startup and final summaries of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainkit.report.tables import print_closing, print_summary
from trainkit.trainer.events import Callback, Run


class StartupSummary(Callback):
    """Prints the effective values before the first step; part of every run."""

    prints: ClassVar[bool] = True

    def run_start(self, run: Run) -> None:
        """Print the table, and where a resumed run continues."""
        if not run.is_owner:
            return
        rows = {**run.summary, "continues at": f"step {run.state.step:,}" if run.state.step else None}
        print_summary(f"{run.cfg.name}  {_short(run.folder)}", rows, notes=run.notes)


class FinalSummary(Callback):
    """Prints the result, the folder, and the commands to inspect and resume; the last output of every run."""

    prints: ClassVar[bool] = True

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Print the summary; not if the run only changes its size and continues at once."""
        if run.is_owner and result.get("status") != "resized":
            print_closing(result, Path(_short(run.folder)))


def _short(folder: Path) -> str:
    """Return the folder as the user would type it in the current directory."""
    try:
        relative = os.path.relpath(folder)
    except ValueError:  # another drive
        return str(folder)
    return str(folder) if relative.startswith("..") else relative
