"""Request the stacks of a hanging rank's threads, before it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

from trainkit.errors import UnreadableError
from trainkit.reading import read_tail
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection.process_evidence import children_of
from trainkit.run.process.worker_group import WorkerGroup

_ANSWER_S: Final = 0.3
_SIZE: Final = 1 << 16


def stacks_of(group: WorkerGroup, folder: RunFolder, rank: int, pid: int | None) -> str:
    """Return the stacks of a rank's threads and of its data loading processes; empty if it cannot write them.

    The other ranks of the group write theirs as well, into their files. A stopped process cannot write them. SIGUSR2
    ends a process of the user that does not handle it, a moment before it is ended with its rank.
    """
    if not hasattr(signal, "SIGUSR2"):
        return ""
    group.signal(signal.SIGUSR2)
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGUSR2)
    time.sleep(_ANSWER_S)
    try:
        stacks = read_tail(folder.stacks_of(rank), _SIZE)[0].decode(errors="replace").strip()
    except UnreadableError:
        return ""
    return f"What its threads were doing:\n{stacks}" if stacks else ""
