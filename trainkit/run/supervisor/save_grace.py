"""Give rank 0 time to save before a failed group is ended."""

from __future__ import annotations

import time
from typing import Final

from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.process.worker_group import WorkerGroup
from trainkit.run.supervisor.failure import Failure

__all__ = ["wait_for_owner_save"]

_NOTICE_S: Final = 1.0
"""How long rank 0 may take to notice that it has lost another rank, and begin to save."""
_SAVE_S: Final = 120.0
"""How long the save may take."""
_WORKING_PHASES: Final = ("data", "forward", "backward", "reduce", "evaluate", "save")
"""Phases in which rank 0 notices a loss, or saves."""


def wait_for_owner_save(folder: RunFolder, group: WorkerGroup, failure: Failure) -> None:
    """Wait while rank 0 saves, or is about to save because it has lost another rank.

    Args:
        folder: holds the heartbeat of rank 0.
        group: the ranks, which are ended next.
        failure: the reason to end the group; if rank 0 itself failed or a rank hangs, this returns at once.
    """
    begun = time.monotonic()
    while 0 in group.running and failure.rank != 0 and not failure.hang:
        heartbeat, waited = read_heartbeat(folder.heartbeat_of(0)), time.monotonic() - begun
        if heartbeat is None or heartbeat.phase not in _WORKING_PHASES or waited > _SAVE_S:
            return
        if heartbeat.phase != "save" and waited > _NOTICE_S:
            return
        time.sleep(0.02)
