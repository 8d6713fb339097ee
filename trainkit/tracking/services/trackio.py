"""Send a run to Trackio: to its local folder (`TRACKIO_DIR`), or to the server or Space that its variables name.

Source: Trackio Python reference, `trackio.init` and `Run`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trackio

from trainkit.tracking.service import LoggedRow, TrackedRun

_FOREIGN: Final = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that the name of an artifact must not contain."""


class _Trackio:
    holds_last = False

    def __init__(self) -> None:
        self._run: trackio.Run | None = None
        self._name = ""
        self._step: int | None = None

    def open(self, run: TrackedRun) -> None:
        self._name = f"{run.name}-{run.id[:8]}"  # Trackio continues a run by its name
        self._run = trackio.init(
            project=run.project,
            name=self._name,
            group=f"fingerprint {run.fingerprint[:16]}",
            config={**run.parameters, "trainkit/id": run.id, "trainkit/fingerprint": run.fingerprint},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # it would monitor the sending process
            auto_log_cpu=False,
        )

    def log(self, rows: Sequence[LoggedRow]) -> None:
        assert self._run is not None
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
            self._step = row.step

    def add_file(self, path: Path, name: str) -> None:
        assert self._run is not None
        self._run.log_artifact(path, name=_FOREIGN.sub("-", f"{self._name}-{name}"), type="file")

    def close(self, *, has_finished: bool, status: str) -> None:
        assert self._run is not None
        self._run.log({"trainkit/status": status}, step=self._step)  # Trackio has no status of runs
        self._run.finish()


def make() -> _Trackio:
    """Return the service."""
    return _Trackio()
