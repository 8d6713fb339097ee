"""The fast lane, `pytest --fast`: a test that comes to start a process is skipped there and then.

No list says which tests these are. While a test runs, Python's audit events of a started process raise the exception
that skips it; where the code under test swallows that exception, the test's result is replaced by the skip.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

EVENTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
ALLOWED: Final = "git"
"""The one program that may start: every run asks it for the commit, in some milliseconds."""
REASON: Final = "starts a process"


class FastLane:
    """The plugin of `--fast`."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._refused: set[str] = set()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in EVENTS or self._item is None:
            return
        if event == "subprocess.Popen" and Path(str(arguments[0])).name == ALLOWED:
            return
        self._refused.add(self._item.nodeid)
        pytest.skip(REASON)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Refuse processes while a test runs, its fixtures included."""
        self._item = item
        try:
            return (yield)
        finally:
            self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a failure that follows a refused process as a skip."""
        report = yield
        if report.failed and item.nodeid in self._refused:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, REASON)
        return report
