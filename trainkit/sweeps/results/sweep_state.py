"""`sweep.json`: the jobs of a sweep and their results, updated after every job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError
from trainkit.run.folder.run_folder import RunFolder, write_atomically
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.results.job_results import SWEEP_FILE, read_jobs
from trainkit.trainer.ownership import set_aside

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
    """None if it was not run or has not ended."""
    tries: int = 0
    """Number of processes started for it with this config, in this sweep and in those it resumes."""
    pruned: bool = False
    """Whether the search stopped it early."""


@dataclass(kw_only=True)
class SweepState:
    """The rows of a sweep, by the name of the job."""

    folder: Path
    rows: dict[str, Row] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """The command line of the user."""

    @classmethod
    def read(cls, folder: Path, *, command: Sequence[str] = ()) -> SweepState:
        """Read the state of an earlier sweep in this folder; an empty one if there is none.

        Raises:
            UnreadableError: the file is damaged; without it, every job would be trained again.
        """
        try:
            rows = [_row(folder, item) for item in read_jobs(folder)]
        except AbsentFileError:
            rows = []
        return cls(folder=folder, rows={row.job: row for row in rows}, command=tuple(command))

    def of(self, config: str) -> Row | None:
        """Return the job with this config."""
        return next((row for row in self.rows.values() if config and row.config == config), None)

    def add(self, job: SweepJob) -> Row:
        """Register a job; a known job of this name keeps its results if its config is the same."""
        known = self.rows.get(job.name)
        if known is None or known.config != job.config or not job.config:
            known = Row(job=job.name, folder=job.folder, overrides=job.overrides)
        known.overrides, known.config, known.slots = job.overrides, job.config, job.slots
        self.rows[job.name] = known
        return known

    def forget_others(self, names: set[str]) -> None:
        """Remove jobs of an earlier sweep that have no result and are not part of this one."""
        self.rows = {name: row for name, row in self.rows.items() if name in names or is_complete(row)}

    def write(self) -> None:
        """Write the file atomically: after a crash it is the previous one or this one."""
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
        """Rename files that have the names of a sweep's files, in a folder without a sweep."""
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
    """Return whether a job did all it was asked to; its process may have been killed before its end was recorded."""
    if row.pruned or row.exit_code not in (0, None) or not row.tries:
        return False
    result = RunFolder(row.folder).read_result()
    return result is not None and (row.exit_code == 0 or result.get("status") == "finished")
