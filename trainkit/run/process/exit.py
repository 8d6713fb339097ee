"""The end of a process that was one of several ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["exit_without_teardown"]


def exit_without_teardown(code: int) -> NoReturn:
    """End the process without taking torch apart.

    At interpreter shutdown torch destroys threads of its own that still run ("terminate called without an active
    exception", SIGABRT in 3 of 6 runs of two ranks): a rank that had done all its work would count as crashed.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - what registered itself there is owed its call
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is gone
            stream.flush()
    os._exit(code)
