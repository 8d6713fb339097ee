"""The fast lane, `pytest --fast`: a test that comes to start a process is skipped there and then.

No list has to say which tests these are: the marker `slow` only saves the work that a test does before, and leaves out
what compiles for seconds. While a test runs, Python's audit events of a started process raise the exception
that skips it; where the code under test swallows that exception, the test's result is replaced by the skip.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

EVENTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
ALLOWED: Final = frozenset({"git", "uname"})
"""Programs that may start: every run asks for the commit, and once in a process for the system, in milliseconds."""
REASON: Final = "starts a process"
SLOW: Final = "slow: left out of the fast lane"


class FastLane:
    """The plugin of `--fast`."""

    NAME: Final = "fast lane"

    def __init__(self, config: pytest.Config) -> None:
        for left_behind in ("Unraisable", "UnhandledThread"):  # files left open, threads that wait for a process
            config.addinivalue_line("filterwarnings", f"ignore::pytest.Pytest{left_behind}ExceptionWarning")
        self._status = 0
        self._item: pytest.Item | None = None
        self._called = False
        self._refused: set[str] = set()
        signal.signal(signal.SIGPROF, self._skip_what_waits)
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in EVENTS or self._item is None:
            return
        if event == "subprocess.Popen" and Path(str(arguments[0])).name in ALLOWED:
            return
        self._refused.add(self._item.nodeid)
        main = threading.main_thread()
        if threading.current_thread() is not main and main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGPROF)
        pytest.skip(REASON)

    def skips(self, item: pytest.Item) -> bool:
        """Return whether a test was refused a process, so that its result is a skip."""
        return item.nodeid in self._refused

    def _skip_what_waits(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: skip a test of which another thread was refused a process."""
        if self._called:
            pytest.skip(REASON)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests marked as slow, before their fixtures are set up."""
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=SLOW))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """Note that the test itself runs, not its fixtures."""
        self._called = True
        try:
            return (yield)
        finally:
            self._called = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Refuse processes while a test runs, its fixtures included."""
        self._item = item
        try:
            return (yield)
        finally:
            self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a failure that follows a refused process as a skip.

        Its traceback is not written: a thread that was refused writes one, too, and Python 3.11 parses the lines of a
        traceback by code that two threads must not run at once.
        """
        if item.nodeid in self._refused and call.excinfo is not None:
            try:
                pytest.skip(REASON)
            except pytest.skip.Exception:
                call.excinfo = pytest.ExceptionInfo.from_current()
        return (yield)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Drop what refused processes left open."""
        self._status = int(exitstatus)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End without the threads that wait for a refused process: they would be waited for."""
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._status)
