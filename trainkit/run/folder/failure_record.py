"""The record of the failure that ends a run."""

from __future__ import annotations

from trainkit.errors import TrainkitError, status_of_error
from trainkit.run.folder.rollbacks import skipped_in
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.manifest import list_complete


def record_failure(folder: RunFolder, error: TrainkitError) -> None:
    """Write the error that ends a run into `result.json`; the progress that rank 0 recorded there stays.

    Rank 0 only knows its own error, which may be that it lost another rank: the process that knows the cause calls
    this function.

    Raises:
        OSError: the file cannot be written.
    """
    complete = list_complete(folder.checkpoints)
    last = {"last": str(complete[0].folder), "steps": complete[0].step} if complete else {"last": None, "steps": 0}
    known = {**last, **skipped_in(folder.checkpoints), "resume": folder.resume_command, **(folder.read_result() or {})}
    folder.write_result({**known, "status": status_of_error(error), "reason": str(error)})
