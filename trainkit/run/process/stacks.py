"""Ask a worker and its data loading processes for the stacks of their threads.

All of them write to one file, which the data loading processes inherit, and faulthandler writes letter by letter: two
processes that write at once would mix their words. So they are asked one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from trainkit.errors import UnreadableError
from trainkit.files import read_tail

_ANSWER_S: Final = 1.0
"""Seconds that a process has to write its stacks."""
_ANSWERS_S: Final = 3.0
"""Seconds that all of them have together."""
_POLL_S: Final = 0.03
_BYTES: Final = 1 << 16
"""The end of the file that is read."""


def stacks_from(file: Path, asks: Iterable[Callable[[], object]]) -> str:
    """Return the stacks that processes write to a file; empty if none of them can write.

    Args:
        file: the file that they share.
        asks: sends a process the signal on which it writes; one for each of them.
    """
    end = time.monotonic() + _ANSWERS_S
    for ask in asks:
        _await_answer(file, end, ask)
    try:
        return read_tail(file, _BYTES)[0].decode(errors="replace").strip()
    except UnreadableError:
        return ""


def _await_answer(file: Path, end: float, ask: Callable[[], object]) -> None:
    """Ask a process, and wait until the file has grown and grows no more, but not for long."""
    before = seen = _size(file)
    try:
        ask()
    except OSError:
        return  # it has ended
    end = min(end, time.monotonic() + _ANSWER_S)
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        now = _size(file)
        if now == seen != before:
            return
        seen = now


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
