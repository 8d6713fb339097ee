"""How jobs and sweeps are stopped: exit codes that say so, and signals that become news."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from trainkit.errors import ConfigError, DataError, StoppedError, TerminatedError

__all__ = ["NOT_TRIED_AGAIN", "STOPPED", "died", "signals_to"]

STOPPED: Final = (StoppedError.exit_code, TerminatedError.exit_code, -signal.SIGINT, -signal.SIGTERM)
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
    """Hand Ctrl-C and SIGTERM on while the block runs; only a main thread can.

    Args:
        take: called in a signal handler: it may do no more than the put of a SimpleQueue, which is reentrant.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        take(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
