"""No orphans: a pipe whose far end is held by the supervisor; when it breaks, a worker and its children end.

On Linux the kernel does it: the pipe sends SIGKILL to the worker's process group when its last writer is gone, which
also ends a worker that is stopped, hangs in C, or has not yet begun to run Python. PR_SET_PDEATHSIG would kill the
worker alone, and leave its data loading processes. Elsewhere (untested) a thread of the worker waits for the break.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from typing import Final

if sys.platform != "win32":
    import fcntl

__all__ = ["VARIABLE", "arm_kill_on_parent_death", "watch_parent"]

VARIABLE: Final = "TRAINKIT_LIFELINE"
"""The environment variable that names the worker's end."""

_F_SETSIG: Final = 10  # of Linux; Python has no name for it


def arm_kill_on_parent_death(reader: int, group: int) -> None:
    """Called by the supervisor: let the break of the pipe kill a process group.

    Args:
        reader: the worker's end of the pipe, still open here; what is set belongs to the pipe, not to the process.
        group: the worker's process group.
    """
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def watch_parent(environ: MutableMapping[str, str]) -> bool:
    """Called by the worker first of all: end with the supervisor.

    The thread covers what `arm` does not: other systems than Linux, and a supervisor that died before it could arm.

    Returns:
        Whether there is a supervisor.
    """
    reader = environ.pop(VARIABLE, "")  # not for our children: the number means nothing to them
    if not reader:
        return False
    threading.Thread(target=_wait_for_break, args=(int(reader),), name="lifeline", daemon=True).start()
    return True


def _wait_for_break(reader: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(reader, 1):
            pass
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
