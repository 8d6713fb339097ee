"""Stop gracefully, by a flag that signals set and the loop reads between steps, and exit.

    Ctrl-C (SIGINT)             "stopped"      exit code 130; a second one ends at once
    SIGTERM, SIGUSR1 (SLURM)    "preempted"    exit code 143
    SIGHUP (terminal closed)    "hangup"       exit code 129; if it was ignored at the start (nohup) it stays ignored
    SIGWINCH of the supervisor  "resized"      exit code 0: continues at once with another number of replicas

Nothing here imports torch: a worker installs the flag before its slow imports, so that no signal is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, NoReturn, Self

from trainkit.errors import HangupError, StopKind, StoppedError, TerminatedError, TrainkitError

EXIT_CODES: Final[Mapping[str, int]] = {
    "finished": 0,
    "stopped": StoppedError.exit_code,
    "preempted": TerminatedError.exit_code,
    "hangup": HangupError.exit_code,
    "resized": 0,
}
"""Status of a result -> exit code of the process; every other status counts as a failure, 1."""

REASONS: Final[Mapping[str, str]] = {
    "finished": "all steps done",
    "stopped": "Ctrl-C",
    "preempted": "asked to end by a signal",
    "hangup": "the terminal was closed (SIGHUP)",
    "resized": "continues with another number of replicas",
}
"""Status of a result -> its reason."""


RESIZE_SIGNAL: Final = signal.SIGWINCH
"""Asks a worker to make room for a larger group. A worker has no terminal, so nothing else sends it this signal, and
processes ignore it by default.
"""
STACKS_SIGNAL: Final = signal.SIGUSR2
"""Makes a worker write the stacks of its threads."""
_TRACKER: Final = "tracker"
"""Name of the threads of `trainkit.tracking`. One that is left at the end hangs, as its package's exit handlers may."""
_EXIT_S: Final = 5.0
"""Seconds that exit handlers then have."""


def stop_signals() -> dict[signal.Signals, StopKind]:
    """Return the signals that request a stop, with the reason of each."""
    return {
        signal.SIGINT: "stopped",
        signal.SIGTERM: "preempted",
        signal.SIGUSR1: "preempted",
        signal.SIGHUP: "hangup",
    }


def worker_signals() -> dict[signal.Signals, StopKind]:
    """Return the stop signals of a worker with a supervisor, which may also ask it to make room for a larger group."""
    return {**stop_signals(), RESIZE_SIGNAL: "resized"}


def blocked_at_start() -> list[signal.Signals]:
    """Return the signals that a worker is started with blocked: they stay pending until the worker handles them."""
    return [*stop_signals(), STACKS_SIGNAL]


def signal_of(reason: StopKind) -> signal.Signals:
    """Return the signal that forwards a stop request to another process."""
    return {"hangup": signal.SIGHUP, "stopped": signal.SIGINT}.get(reason, signal.SIGTERM)


def stop_error(reason: str, message: str) -> TrainkitError:
    """Return the error of a run that was asked to stop and could not end regularly."""
    return {"stopped": StoppedError, "hangup": HangupError}.get(reason, TerminatedError)(message)


def is_ignored(number: signal.Signals) -> bool:
    """Return whether a signal must stay ignored: SIGHUP, if this process was started by `nohup` or similar."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def ignore_request(reason: StopKind) -> None:
    """Do nothing: a request to stop is only read from the flag."""
    del reason


class StopFlag:
    """Catches stop signals for the duration of its block, and stores the first reason.

    Only the first reason counts, except that a stop overrides a resize. Signal handlers can be installed in the main
    thread only: elsewhere the flag is set by `request` alone.

    Example:
        >>> with StopFlag() as stop:
        ...     stop.request("preempted")
        ...     print(stop.requested)
        preempted
    """

    def __init__(
        self,
        on_request: Callable[[StopKind], None] = ignore_request,
        *,
        signals: Mapping[signal.Signals, StopKind] | None = None,
    ) -> None:
        self.requested: StopKind | None = None
        """The reason to stop, or None: continue."""
        self._on_request = on_request
        self._signals = stop_signals() if signals is None else signals
        self._interrupts = 0
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def request(self, reason: StopKind) -> None:
        """Request a stop; later reasons do not replace the first, unless that was a resize."""
        if self.requested is None or (self.requested == "resized" and reason != "resized"):
            self.requested = reason
            self._on_request(reason)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            caught = [number for number in self._signals if not is_ignored(number)]
            self._previous = {number: signal.signal(number, self._handle) for number in caught}
            # The supervisor starts workers with these signals blocked: a pending one arrives now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:
            # A forked process inherits the handler. Ctrl-C and the closing of a terminal reach data loading processes
            # too: they continue, because the current step needs their batches, and end with their parent.
            if self._signals[signal.Signals(number)] not in ("stopped", "hangup"):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.request(self._signals[signal.Signals(number)])


@contextlib.contextmanager
def raised_stops() -> Iterator[None]:
    """Raise the error of a stop signal in the main thread, so that the block ends and removes its partial results.

    Ctrl-C raises KeyboardInterrupt without it. In another thread it changes nothing.

    Raises:
        TerminatedError, HangupError: the first of these signals has come; later ones are ignored.
    """
    signals = {number: reason for number, reason in stop_signals().items() if reason != "stopped"}
    with StopFlag(_raise_stop, signals=signals):
        yield


def _raise_stop(reason: StopKind) -> None:
    raise stop_error(reason, f"{REASONS[reason]}.")


def exit_as_interpreter(code: int) -> NoReturn:
    """Exit as an interpreter does, but for the objects of all modules, which take a second to free after torch.

    Threads that are no daemons are joined, exit functions run, and files that are still open are flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - idle pools of threads end by it
    for obj in gc.get_objects():
        if issubclass(type(obj), io.IOBase):
            with contextlib.suppress(OSError, ValueError):  # closed, or not to be written
                obj.flush()
    exit_without_teardown(code)


def open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller has closed, as services may.

    Otherwise the next file gets its number, and what a library or a child process prints is written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def exit_without_teardown(code: int) -> NoReturn:
    """Exit without destroying torch's objects.

    At interpreter shutdown torch destroys its own threads while they still run ("terminate called without an active
    exception", SIGABRT in 3 of 6 runs of two ranks): a rank that had finished its task would count as crashed.
    """
    handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # noqa: SLF001 - they must run
    if any(thread.name == _TRACKER for thread in threading.enumerate()):
        handlers.start()
        handlers.join(_EXIT_S)
    else:
        handlers.run()  # in this thread
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is closed
            stream.flush()
    os._exit(code)
