"""Forks that stand for commands end with the process that asked for them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.quick import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="commands are forks on Linux alone")
def test_a_fork_whose_client_was_killed_before_it_listened_ends() -> None:
    """Where it stayed, a sweep that was refused in its first second waited for it for ever."""
    program = (
        "import os; from tests.support import quick; reader, writer = os.pipe(); os.close(writer); "
        "quick._end_with(reader); print('alive')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, start_new_session=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
