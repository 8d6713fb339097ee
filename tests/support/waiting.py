"""Waiting in a test for what other processes do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], object], *processes: subprocess.Popen[Any], timeout_s: float = 300) -> None:
    """Wait until a condition holds, while the processes run."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert not any(process.poll() is not None for process in processes), "a process has ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
