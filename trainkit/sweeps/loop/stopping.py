"""How jobs and sweeps stop: their exit codes, and the forwarding of signals."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from trainkit.errors import ConfigError, DataError, HangupError, StoppedError, TerminatedError
from trainkit.run.signals import is_ignored

HANGUP: Final = getattr(signal, "SIGHUP", None)
"""The terminal was closed; Windows has no such signal."""
STOPPED: Final = (
    *(kind.exit_code for kind in (StoppedError, TerminatedError, HangupError)),
    *(-number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None),
)
"""Exit codes of a job that was asked to stop."""
NOT_TRIED_AGAIN: Final = (0, ConfigError.exit_code, DataError.exit_code, StoppedError.exit_code, -signal.SIGINT)
"""Exit codes of jobs that are not retried: a retry would end the same way, or the user stopped the job."""


def died(code: int) -> str:
    """Return the text of how a failed job ended.

    Example:
        >>> died(1), died(-9)
        ('exit 1', 'signal 9')
    """
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def signals_to(take: Callable[[int], None]) -> Iterator[None]:
    """Forward Ctrl-C, SIGTERM and SIGHUP while the block runs, in the main thread only. A SIGHUP ignored before stays
    so.

    Args:
        take: called in a signal handler: it may only do reentrant operations, such as the put of a SimpleQueue.
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
