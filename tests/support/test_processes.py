"""The fast lane starts no process and skips the test that would, also where the test swallows the refusal."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pool import ROOT

CONFTEST = """
from tests.support.processes import FastLane

def pytest_configure(config):
    config.addinivalue_line("markers", "slow")
    config.pluginmanager.register(FastLane(config))
"""
TESTS = """
import subprocess
import sys
import threading

import pytest

COMMAND = [sys.executable, "-c", "open('started', 'w')"]

def test_that_starts_none():
    assert subprocess.run(["git", "--version"]).returncode == 0

def test_that_starts_one():
    subprocess.run(COMMAND, check=True)

def test_that_swallows_the_refusal():
    try:
        subprocess.run(COMMAND, check=True)
    except BaseException:
        raise ValueError("no process") from None

def test_that_waits_for_a_thread_that_starts_one():
    ended = threading.Event()

    def start():
        subprocess.run(COMMAND, check=True)
        ended.set()

    threading.Thread(target=start).start()
    ended.wait()

@pytest.mark.slow
def test_that_is_slow():
    open("started", "w")

def test_that_fails():
    assert False
"""


def test_what_starts_a_process_is_skipped_and_what_fails_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed, 4 skipped" in done.stdout, done.stdout + done.stderr
    assert "starts a process" in done.stdout
    assert not (tmp_path / "started").exists()
