import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.faking import alive, assert_no_process_is_left, launch, pids_of
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def running(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of two workers with a child each, in the middle of a long training."""
    monkeypatch.setenv("FAKE", "steps=100000 pause=0.02 child=1")
    process = launch(folder, 2)
    try:
        yield process
    finally:
        for pid in (process.pid, *alive(pids_of(folder))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        present(process.stdout).close()
        process.wait()


def test_one_ctrl_c_stops_and_saves(running: subprocess.Popen[str], folder: RunFolder) -> None:
    running.send_signal(signal.SIGINT)
    assert json.loads(running.communicate(timeout=60)[0].splitlines()[-1]) == {"status": "stopped", "attempt": 0}
    assert running.returncode == 0  # the caller of supervise turns the status into 130
    assert_no_process_is_left(folder)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGHUP, "hangup")])
def test_sigterm_and_sighup_stop_and_save_too(
    running: subprocess.Popen[str], folder: RunFolder, number: int, status: str
) -> None:
    running.send_signal(number)
    assert json.loads(running.communicate(timeout=60)[0].splitlines()[-1]) == {"status": status, "attempt": 0}
    assert_no_process_is_left(folder)


def test_a_ctrl_c_before_the_workers_are_up_is_not_lost(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "steps=100000 pause=0.02")
    monkeypatch.setattr("tests.run.faking.wait_for", lambda condition: None)
    process = launch(folder, 2)
    while not folder.live.exists():  # made just before the first worker is started
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert json.loads(process.communicate(timeout=60)[0].splitlines()[-1])["status"] == "stopped"


def test_the_second_ctrl_c_ends_everything_at_once(running: subprocess.Popen[str], folder: RunFolder) -> None:
    for pid in pids_of(folder):
        os.kill(pid, signal.SIGSTOP)  # nobody will answer the first
    running.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    screen, _ = running.communicate(timeout=60)
    assert screen.splitlines()[-1] == "StoppedError stopped at once. There is no checkpoint."
    assert running.returncode == 130
    assert_no_process_is_left(folder, within_s=20)


@pytest.mark.parametrize("asleep", [False, True], ids=["running", "stopped"])
def test_no_worker_runs_after_its_supervisor_was_killed(
    running: subprocess.Popen[str], folder: RunFolder, asleep: bool
) -> None:
    if asleep:
        for pid in pids_of(folder):
            os.kill(pid, signal.SIGSTOP)
    running.kill()
    running.wait()
    assert_no_process_is_left(folder, within_s=20)


def test_a_killed_worker_does_not_outlive_the_supervisor_either(
    running: subprocess.Popen[str], folder: RunFolder
) -> None:
    worker = pids_of(folder)[0]
    os.kill(worker, signal.SIGKILL)
    assert "rank 0 was ended by SIGKILL" in plain(running.communicate(timeout=60)[0])
    assert running.returncode == 1
    assert_no_process_is_left(folder, within_s=20)


def test_the_signal_for_stacks_does_not_end_a_worker_that_only_starts(tmp_path: Path) -> None:
    exits: list[ProcessExit] = []
    with WorkerGroup(0, exits.append) as group:
        group.start(0, [sys.executable, "-c", ""], os.environ, tmp_path / "log")
        group.signal(signal.SIGUSR2)
        group.join()
    assert [one.code for one in exits] == [0]
