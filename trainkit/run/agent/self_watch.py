"""Watch a rank from a thread of its own process, if no parent watches it, or the other processes of its launch.

The thread interrupts the main thread with an error that names its phase, so that the run ends as after any other error.
If the main thread does not handle the interrupt, because it executes code that does not return to Python, the process
exits after a grace period. C code that holds the GIL also blocks this thread: such a rank is found by other ranks of
its host, and not at all in a run of one process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from trainkit.cluster.host import ThreadTimes
from trainkit.errors import HangError, StopKind, TrainkitError
from trainkit.run.agent.failure import ProcessEvidence, facts_of, failure_of
from trainkit.run.agent.monitor import Monitor, TimeLimits, threads_of
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_result import record_failure
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat, HeartbeatReading, Pauses
from trainkit.run.signals import stop_error
from trainkit.trainer.failpoints import Phase

_GRACE_S: Final = 10.0
"""Seconds that the main thread has to handle the interrupt."""
_ENDING_S: Final = 60.0
"""Seconds that it then has to end the run."""
_DEBUGGERS: Final = ("bdb.py", "pydevd.py", "pydevd_runpy.py")
"""Files of debuggers: a thread that executes one of them counts as waiting for the user."""


class BeatCounter:
    """The heartbeats of a run of one process: it receives phases outside of steps, and reads the step count itself.

    This costs the steps no time. If failpoints are armed, every phase is reported, since they need it.
    """

    def __init__(self, relay: Heartbeat | None = None) -> None:
        self.within_steps = relay is not None
        """Whether the phases within a step are reported as well."""
        self._relay, self._pauses, self._lock = relay, Pauses(), threading.Lock()
        self.heartbeat = HeartbeatReading(moment=time.monotonic(), step=0, phase="start", is_first=True)
        """The last heartbeat."""
        self._step_of: Callable[[], int] | None = None

    @property
    def phase(self) -> Phase:
        """The last reported phase."""
        return self.heartbeat.phase

    @property
    def step(self) -> int:
        """Updates completed now."""
        return self.count().step

    def __call__(self, phase: Any, step: int) -> None:
        """Record a heartbeat."""
        with self._lock:
            self._beat(phase, step)
        if self._relay is not None:
            self._relay(phase, step)

    def follow(self, step_of: Callable[[], int]) -> None:
        """Count steps from now on."""
        self._step_of = step_of

    def count(self) -> HeartbeatReading:
        """Return the last heartbeat, after reading the number of steps."""
        if self._step_of is not None and (step := self._step_of()) != self.heartbeat.step:
            with self._lock:
                if step != self.heartbeat.step:  # the main thread has reported no phase since
                    self._beat("data", step)
        return self.heartbeat

    def _beat(self, phase: Phase, step: int) -> None:
        moment, pauses = time.monotonic(), self._pauses
        pauses.note(phase, step, moment=moment)
        self.heartbeat = HeartbeatReading(
            moment=moment,
            step=step,
            phase=phase,
            longest_s=pauses.longest_s,
            is_first=pauses.is_first,
            is_counted=phase == "data" and not self.within_steps,
        )


class ThreadWatch(ABC):
    """A thread that raises an error in the main thread, in which it is entered, or else exits the process.

    Args:
        interval_s: seconds between two calls of `look`.
        grace_s: seconds that the main thread has to take the error before `leave` exits the process.
    """

    def __init__(self, *, interval_s: float, grace_s: float) -> None:
        self._interval_s, self._grace_s = interval_s, grace_s
        self._error: TrainkitError | None = None
        self._taken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._main: int | None = None
        self._before: signal._HANDLER = None
        self._blocked = set[int | signal.Signals]()

    @abstractmethod
    def look(self) -> TrainkitError | None:
        """Return the error to raise in the main thread; None: continue."""

    @abstractmethod
    def leave(self, error: TrainkitError, stack: str) -> None:
        """Report an error that the main thread does not take, with its stack, and exit the process."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._main = threading.get_ident()
            self._before = signal.signal(signal.SIGUSR2, self._interrupt)
            # A fork was started with it blocked, and has it so again once nothing handles it.
            self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._main is not None:
            self._thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
            signal.signal(signal.SIGUSR2, self._before if self._before is not None else signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        error, self._error = self._error, None
        if error is not None:
            self._taken.set()
            raise error

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            if (error := self.look()) is None:
                continue
            assert self._main is not None
            stack = "".join(traceback.format_stack(self._frame())).rstrip()
            self._error = error
            signal.pthread_kill(self._main, signal.SIGUSR2)
            is_ending = self._taken.wait(self._grace_s) and self._over.wait(_ENDING_S)
            if not is_ending and not self._over.is_set() and "ipykernel" not in sys.modules:
                self.leave(error, stack)
            return

    def _frame(self) -> FrameType | None:
        return None if self._main is None else sys._current_frames().get(self._main)  # noqa: SLF001 - as documented


class SelfWatch(ThreadWatch):
    """Ends this process if its rank makes no progress for longer than its limit."""

    def __init__(
        self,
        limits: TimeLimits,
        folder: RunFolder,
        *,
        read: Callable[[int], HeartbeatReading | None] | None = None,
        requested: Callable[[], StopKind | None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder, self._requested, self._exit = folder, requested, exit_process
        self._monitor = Monitor(
            limits,
            folder,
            read=read,
            pid_of=lambda _rank: os.getpid(),
            threads=_other_threads,
            asked_to_stop=lambda: requested() is not None,
        )
        super().__init__(interval_s=self._monitor.interval_s, grace_s=_GRACE_S)

    def look(self) -> TrainkitError | None:
        """Return the error of a rank that has made no progress for too long."""
        if in_debugger(self._frame()):
            self._monitor.restart()
            return None
        overdue = self._monitor.look([0])
        if overdue is None:
            return None
        evidence, reason = ProcessEvidence(self._folder), self._requested()
        headline = failure_of(evidence, facts_of(evidence, running=[0], overdue=overdue)).headline
        return HangError(headline) if reason is None else stop_error(reason, headline)

    def leave(self, error: TrainkitError, stack: str) -> None:
        """Write the report and the result, and exit."""
        write_error_report(self._folder.error_of(0), 0, error)
        if self._folder.read_result() is None:
            record_failure(self._folder, error)
        print(f"{error}\n{stack}", file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal
        self._exit(error.exit_code)


def _other_threads(pid: int, phase: Phase) -> Mapping[int, ThreadTimes]:
    """Return the times of the threads of this process and of its children, except the calling thread."""
    return {thread: times for thread, times in threads_of(pid, phase).items() if thread != threading.get_native_id()}


def in_debugger(frame: FrameType | None) -> bool:
    """Return whether a thread at this frame waits in a debugger."""
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
