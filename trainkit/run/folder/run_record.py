"""What the process that holds a run folder keeps up to date beside the training: `train.log` and `status.json`."""

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
    """The files of a run that goes."""

    folder: RunFolder
    log: TrainLog
    status: StatusFile

    def follow_pulse(self) -> None:
        """Take the step from the heartbeat of rank 0, which another process writes."""

        def step() -> int | None:
            pulse = read_heartbeat(self.folder.heartbeat_of(0))
            return None if pulse is None or pulse.phase == "start" else pulse.step

        self.status.follow(step)


@contextmanager
def recorded_run(folder: RunFolder, *, confirm: Callable[[], None] | None = None) -> Iterator[RunRecord]:
    """Record what a run shows and does, and the error that it ends with, while the block runs.

    Args:
        folder: the run folder, which this process holds.
        confirm: raises where the folder is another group's by now.
    """
    folder.take()  # a log or status of the user's is set aside before one is written
    with recorded_output(folder.log, separated=True) as log, StatusFile(folder, confirm=confirm) as status:
        try:
            yield RunRecord(folder=folder, log=log, status=status)
        except BaseException as error:
            log.write_error(error)
            raise
