"""The exit of a process that was one of several ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def exit_without_teardown(code: int) -> NoReturn:
    """Exit without destroying torch's objects.

    At interpreter shutdown torch destroys its own threads while they still run ("terminate called without an active
    exception", SIGABRT in 3 of 6 runs of two ranks): a rank that had finished its task would count as crashed.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - registered exit handlers must run
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is closed
            stream.flush()
    os._exit(code)
