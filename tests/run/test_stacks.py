"""A stack of a hanging process that is lost among those of its data loading processes is caught here alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from trainkit.run.process.stacks import stacks_from

SCRIPT = """
import faulthandler, os, signal, sys, time
file = open(sys.argv[1], "wb")
faulthandler.register(signal.SIGUSR2, file=file)
def a_function_with_a_long_name(depth):
    if depth:
        return a_function_with_a_long_name(depth - 1)
    pids = [os.getpid()]
    for _ in range(3):
        if (pid := os.fork()) == 0:
            break
        pids.append(pid)
    else:
        print(*pids, flush=True)
    time.sleep(60)
a_function_with_a_long_name(60)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="this system has no SIGUSR2")
def test_processes_that_share_a_file_do_not_mix_their_words(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            stacks = stacks_from(file, [partial(os.kill, pid, signal.SIGUSR2) for pid in pids])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    title, line = r"Current thread 0x\w+ \(most recent call first\):", r'  File "<string>", line \d+ in [a-z_<>]+'
    assert [one for one in stacks.splitlines() if not re.fullmatch(f"{title}|{line}", one)] == []
    assert stacks.count("in a_function_with_a_long_name\n") == 4 * 61
    assert stacks.count("<module>") == 4


def test_a_process_that_cannot_be_asked_or_does_not_write_costs_no_answer_of_others(tmp_path: Path) -> None:
    file = tmp_path / "stacks"

    def has_ended() -> None:
        raise ProcessLookupError

    assert stacks_from(file, [has_ended]) == ""
    assert stacks_from(file, [has_ended, lambda: None, partial(file.write_text, "a stack\n")]) == "a stack"
