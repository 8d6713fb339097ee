"""The command line of this process in `ps` and `/proc/PID/cmdline`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainkit.redaction import redacted_argument

__all__ = ["hide_from_process_list"]

_ARG_START: Final = 45
"""Index of `arg_start` and `arg_end` among the fields after the name in /proc/PID/stat (fields 48 and 49)."""


def hide_from_process_list(arguments: Sequence[str]) -> None:
    """Overwrite the secrets of this process's own command line with asterisks, in its memory.

    Forks of this process, such as its data workers, show the same. The system showed the original command line until
    trainkit started. On systems other than Linux this does nothing.

    Args:
        arguments: the command line; nothing is changed if this process was started with another one.
    """
    secrets = [argument for argument in arguments if redacted_argument(argument) != argument]
    if not secrets:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if end - start != len(own):
            return
        for secret in secrets:
            word = os.fsencode(secret)
            key = word.partition(b"=")[0] + b"="
            place = own.find(b"\0" + word + b"\0")
            if place >= 0:
                ctypes.memset(start + place + 1 + len(key), ord("*"), len(word) - len(key))
