"""End orphaned workers: the supervisor holds the write end of a pipe; when it closes, a worker and its children end.

On Linux the kernel does this: the pipe sends SIGKILL to the worker's process group when its last writer has closed it,
which also ends a worker that is stopped, hangs in C code, or has not yet started Python. PR_SET_PDEATHSIG would kill
only the worker, not its data loading processes. On other systems (untested) a thread of the worker waits for the pipe
to close.
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

VARIABLE: Final = "TRAINKIT_LIFELINE"
"""The environment variable with the file descriptor of the read end."""

_F_SETSIG: Final = 10  # a Linux constant without a name in Python


def arm_kill_on_parent_death(reader: int, group: int) -> None:
    """Let the closing of the pipe kill a process group; called by the supervisor.

    The read end is still open here; the setting belongs to the pipe, not to the process.
    """
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def watch_parent(environ: MutableMapping[str, str]) -> bool:
    """End this process with the supervisor; called by the worker before anything else.

    The thread covers what the kernel does not: other systems than Linux, and a supervisor that died before it could arm
    the pipe.

    Returns:
        Whether there is a supervisor.
    """
    reader = environ.pop(VARIABLE, "")  # not for child processes: the descriptor is not open there
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
