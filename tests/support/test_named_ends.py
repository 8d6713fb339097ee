"""A session that one test ends with an INTERNALERROR, or holds up for ever, is caught here alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import ctypes, os, time
import pytest

@pytest.mark.parametrize("number", range(12))
def test_passes(number):
    time.sleep(0.05)

def test_is_killed():
    os.kill(os.getpid(), 9)

@pytest.mark.timeout(1)
def test_hangs_in_c():
    held = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(held)

@pytest.mark.timeout(1)
def test_is_slow():
    time.sleep(20)

def test_raises_in_a_hook():
    pass
"""
HOOKS = """
import os
from tests.support import named_ends

named_ends.GRACE_S = 1

def pytest_runtest_logfinish(nodeid):
    if nodeid.endswith("hook") and "PYTEST_XDIST_WORKER" in os.environ:
        raise RuntimeError("as an alarm would")
"""


@pytest.mark.slow
def test_a_test_that_is_killed_hangs_or_raises_in_a_hook_is_named_and_the_rest_runs_on(tmp_path: Path) -> None:
    (tmp_path / "test_scratch.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(HOOKS)
    here = ["-c", f"{ROOT}/pyproject.toml", "--rootdir", str(tmp_path), "--basetemp", str(tmp_path / "temp")]
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--numprocesses=2", *here]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    named = {line.split("::")[1].split()[0] for line in ended.stdout.splitlines() if line.startswith("FAILED")}
    assert named == {"test_is_killed", "test_hangs_in_c", "test_is_slow", "test_raises_in_a_hook"}
    assert "in test_hangs_in_c" in ended.stderr
    assert {word for word in ended.stdout.splitlines()[-1].replace(",", "").split() if word.isdigit()} == {"4", "13"}
