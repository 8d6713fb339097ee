"""A polite end: signals become a flag that the loop reads between steps.

    Ctrl-C (SIGINT)             "stopped"      exit code 130; a second one ends at once
    SIGTERM, SIGUSR1 (SLURM)    "preempted"    exit code 143

Nothing here imports torch: a worker installs the flag before its slow imports, so that no signal is lost to them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self

__all__ = ["EXIT_CODES", "Reason", "StopFlag", "stop_signals"]

Reason = Literal["stopped", "preempted"]

EXIT_CODES: Final[Mapping[str, int]] = {"finished": 0, "stopped": 130, "preempted": 143}
"""Status of a result -> exit code of the process; every other status is a failure, 1."""


def stop_signals() -> dict[signal.Signals, Reason]:
    """The signals that ask for a stop, and the reason each one gives; Windows has no SIGUSR1."""
    signals: dict[signal.Signals, Reason] = {signal.SIGINT: "stopped", signal.SIGTERM: "preempted"}
    if hasattr(signal, "SIGUSR1"):
        signals[signal.SIGUSR1] = "preempted"
    return signals


class StopFlag:
    """Catches stop signals while its block runs, and remembers why to stop.

    Only the first reason counts. Outside the main thread no handler can be installed: the flag then stays down
    unless `request` is called.

    Example:
        >>> with StopFlag() as stop:
        ...     stop.request("preempted")
        ...     print(stop.requested)
        preempted
    """

    def __init__(self, on_request: Callable[[Reason], None] | None = None) -> None:
        self._requested: Reason | None = None
        self._on_request = on_request
        self._interrupts = 0
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> Reason | None:
        """Why to stop, or None: go on."""
        return self._requested

    def request(self, reason: Reason) -> None:
        """Ask for a stop; later reasons do not replace the first."""
        if self._requested is None:
            self._requested = reason
            if self._on_request is not None:
                self._on_request(reason)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
            if hasattr(signal, "pthread_sigmask"):
                # The supervisor starts workers with these blocked; one that came before the handlers arrives now.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, list(self._previous))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:
            self._handle_in_child(number)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.request(stop_signals()[signal.Signals(number)])

    def _handle_in_child(self, number: int) -> None:
        """A forked process inherits the handler, not the job.

        A Ctrl-C reaches data loading processes too: they go on, since the step under way needs their batches, and end
        with their parent. Whoever sends them SIGTERM means them.
        """
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
