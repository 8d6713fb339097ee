"""`sweep.json`: the jobs of a sweep and what became of them, right after every job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError
from trainkit.run.folder.run_folder import RunFolder, write_atomically
from trainkit.sweeps.loop.job_sources import SweepJob
from trainkit.sweeps.results.job_results import SWEEP_FILE, read_jobs
from trainkit.trainer.ownership import set_aside

__all__ = ["FILE", "Row", "SweepState", "is_complete"]

FILE: Final = SWEEP_FILE


@dataclass(kw_only=True)
class Row:
    """One job."""

    job: str
    folder: Path
    overrides: tuple[str, ...]
    config: str = ""
    slots: int = 1
    exit_code: int | None = None
    """None: it was not run, or has not ended."""
    tries: int = 0
    """Processes that were started for it with this config, in this sweep and in those it resumes."""
    pruned: bool = False
    """Whether the search stopped it early."""


@dataclass(kw_only=True)
class SweepState:
    """The rows of a sweep, by the name of the job."""

    folder: Path
    rows: dict[str, Row] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """What the user typed."""

    @classmethod
    def read(cls, folder: Path, *, command: Sequence[str] = ()) -> SweepState:
        """Read that of an earlier sweep in this folder; an empty one where there is none.

        Raises:
            UnreadableError: the file is damaged; without it every job would be trained again.
        """
        try:
            rows = [_row(folder, item) for item in read_jobs(folder)]
        except AbsentFileError:
            rows = []
        return cls(folder=folder, rows={row.job: row for row in rows}, command=tuple(command))

    def of(self, config: str) -> Row | None:
        """The job with this config."""
        return next((row for row in self.rows.values() if config and row.config == config), None)

    def add(self, job: SweepJob) -> Row:
        """Take note of a job; of one that is known under this name, what became of it counts while its config stays."""
        known = self.rows.get(job.name)
        if known is None or known.config != job.config or not job.config:
            known = Row(job=job.name, folder=job.folder, overrides=job.overrides)
        known.overrides, known.config, known.slots = job.overrides, job.config, job.slots
        self.rows[job.name] = known
        return known

    def forget_others(self, names: set[str]) -> None:
        """Leave out jobs of an earlier sweep that gave nothing and are not asked for any more."""
        self.rows = {name: row for name, row in self.rows.items() if name in names or is_complete(row)}

    def write(self) -> None:
        """Write it, so that a crash leaves the one before or this one."""
        rows = [
            {
                "job": row.job,
                "folder": os.path.relpath(row.folder, self.folder),
                "overrides": list(row.overrides),
                "exit_code": row.exit_code,
                "config": row.config,
                "slots": row.slots,
                "tries": row.tries,
                "pruned": row.pruned,
            }
            for row in self.rows.values()
        ]
        content = {"command": list(self.command), "jobs": rows}
        self._keep_others()
        write_atomically(self.folder / FILE, json.dumps(content, indent=2) + "\n")

    def _keep_others(self) -> None:
        """Set aside what has the names of a sweep's files, in a folder that no sweep has been in."""
        if not (self.folder / FILE).exists():
            for other in self.folder.glob("leaderboard.*"):
                set_aside(other, "was not written by this sweep")


def _row(folder: Path, item: dict[str, Any]) -> Row:
    return Row(
        job=str(item["job"]),
        folder=folder / item["folder"],
        overrides=tuple(item["overrides"]),
        config=str(item.get("config", "")),
        slots=int(item.get("slots", 1)),
        exit_code=item.get("exit_code"),
        tries=int(item.get("tries", 0)),
        pruned=bool(item.get("pruned", False)),
    )


def is_complete(row: Row) -> bool:
    """Whether a job did all it was asked to; its process may have been killed before its end was noted."""
    if row.pruned or row.exit_code not in (0, None) or not row.tries:
        return False
    result = RunFolder(row.folder).read_result()
    return result is not None and (row.exit_code == 0 or result.get("status") == "finished")
