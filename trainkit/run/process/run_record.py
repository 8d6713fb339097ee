"""The files that the process with the lock of a run folder updates during the training: `train.log` and
`status.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainkit.report.train_log import TrainLog, recorded_output
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import StatusFile
from trainkit.run.process.heartbeat import read_heartbeat

__all__ = ["RunRecord", "recorded_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of an active run."""

    folder: RunFolder
    log: TrainLog
    status: StatusFile

    def follow_heartbeat(self) -> None:
        """Read the step from the heartbeat of rank 0, which another process writes."""

        def step() -> int | None:
            heartbeat = read_heartbeat(self.folder.heartbeat_of(0))
            return None if heartbeat is None or heartbeat.phase == "start" else heartbeat.step

        self.status.follow(step)


@contextmanager
def recorded_run(folder: RunFolder, *, confirm: Callable[[], None] | None = None) -> Iterator[RunRecord]:
    """Record the output of a run, its status, and the error that ends it, for the duration of the block.

    Args:
        folder: the run folder, which this process holds.
        confirm: raises if another group owns the folder now.
    """
    folder.take()  # renames a log or status file of the user before one is written
    with recorded_output(folder.log, separated=True) as log, StatusFile(folder, confirm=confirm) as status:
        try:
            yield RunRecord(folder=folder, log=log, status=status)
        except BaseException as error:
            log.write_error(error)
            raise
