"""How jobs and sweeps are stopped: exit codes that say so, and signals that become news."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from trainkit.errors import ConfigError, DataError, HangupError, StoppedError, TerminatedError
from trainkit.run.process.signals import is_ignored

__all__ = ["HANGUP", "NOT_TRIED_AGAIN", "STOPPED", "died", "signals_to"]

HANGUP: Final = getattr(signal, "SIGHUP", None)
"""The terminal is gone; Windows has no such signal."""
STOPPED: Final = (
    *(kind.exit_code for kind in (StoppedError, TerminatedError, HangupError)),
    *(-number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None),
)
"""Exit codes of a job that was asked to end."""
NOT_TRIED_AGAIN: Final = (0, ConfigError.exit_code, DataError.exit_code, StoppedError.exit_code, -signal.SIGINT)
"""Those of what would end the same way, and of what a person wanted."""


def died(code: int) -> str:
    """How a job ended that failed.

    Example:
        >>> died(1), died(-9)
        ('exit 1', 'signal 9')
    """
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def signals_to(take: Callable[[int], None]) -> Iterator[None]:
    """Hand on Ctrl-C, SIGTERM and SIGHUP while the block runs; only a main thread can. An ignored SIGHUP stays so.

    Args:
        take: called in a signal handler: it may do no more than the put of a SimpleQueue, which is reentrant.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        take(number)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
    before = {number: signal.signal(number, handle) for number in numbers if not is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
