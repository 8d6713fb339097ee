"""Waiting that logs what is missing: one line after 3 s, further lines at growing intervals, an error at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from trainkit.errors import HangError

_FIRST_S: Final = 3.0
_LONGEST_S: Final = 60.0


class WaitReporter:
    """Sleeps in short intervals and logs the missing ranks: after 3 s, then at intervals that double up to 60 s."""

    def __init__(
        self,
        missing: Callable[[], str],
        *,
        timeout_s: float,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._missing, self._timeout_s, self._log = missing, timeout_s, log or _print
        self._clock, self._sleep = clock, sleep
        self._begun = clock()
        self._interval_s = min(_FIRST_S, timeout_s / 2)
        self._next_line_s = self._interval_s

    def wait(self, moment_s: float) -> None:
        """Sleep for a moment.

        Raises:
            HangError: the timeout has passed.
        """
        waited = self._clock() - self._begun
        if waited >= self._timeout_s:
            raise HangError(f"waited {self._timeout_s:g} s (supervisor.join_timeout_s) in vain for {self._missing()}.")
        if waited >= self._next_line_s:
            self._log(f"waiting for {self._missing()}" + (f", {waited:.0f} s" if waited > _FIRST_S * 1.5 else ""))
            self._interval_s = min(self._interval_s * 2, _LONGEST_S)
            self._next_line_s = waited + self._interval_s
        self._sleep(moment_s)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal
