"""What ends a session names its test: a hang in C, and an exception that is raised between the phases of a test.

pytest-timeout raises in the main thread, wherever it is: in a test, but also while its report is written or sent. Of
such an exception pytest makes an INTERNALERROR, and pytest-xdist ends the whole session with it. Where the main thread
is in C and does not come back, nothing is raised at all: there the process ends, and xdist names the test and goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Generator

import pytest
from _pytest.outcomes import OutcomeException

GRACE_S = 120.0
"""How much longer than its time limit a test may take, to be cleared up, before its process ends."""


class NamedEnds:
    """The plugin of every session."""

    def __init__(self, stderr: int) -> None:
        self._stderr = os.dup(stderr)  # while a test runs, pytest captures the other

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Report what the protocol of a test raises as its failure, and go on with the next."""
        limit = _limit_s(item)
        if limit:
            faulthandler.dump_traceback_later(limit + GRACE_S, file=self._stderr, exit=True)
        try:
            return (yield)
        except (Exception, OutcomeException) as error:  # noqa: BLE001 - what ends pytest on purpose is neither
            text = pytest.ExceptionInfo.from_exception(error).getrepr()
        finally:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception, OutcomeException):
            item.session._setupstate.teardown_exact(nextitem)
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", str(text), "call")
        item.ihook.pytest_runtest_logreport(report=report)
        return True

    def pytest_enter_pdb(self) -> None:
        """Leave the one who looks for a bug the time."""
        faulthandler.cancel_dump_traceback_later()


def _limit_s(item: pytest.Item) -> float:
    """Return the time limit that pytest-timeout has for a test; 0: none."""
    marker = item.get_closest_marker("timeout")
    option = item.config.getoption("timeout", None)
    return float(marker.args[0] if marker else item.config.getini("timeout") if option is None else option)
