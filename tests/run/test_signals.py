"""A worker, or its child, that lives on after Ctrl-C or after its supervisor was killed is caught here alone."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.run.faking import alive, assert_no_process_is_left, launch, pids_of
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.strategies.rendezvous_store import HostedStore


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


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, "stopped"), (signal.SIGTERM, "preempted"), (signal.SIGHUP, "hangup")]
)
def test_a_signal_stops_and_saves(running: subprocess.Popen[str], folder: RunFolder, number: int, status: str) -> None:
    running.send_signal(number)
    assert json.loads(running.communicate(timeout=60)[0].splitlines()[-1]) == {"status": status, "attempt": 0}
    assert running.returncode == 0  # the caller of supervise turns the status into an exit code
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
def test_no_worker_outlives_its_supervisor(running: subprocess.Popen[str], folder: RunFolder, asleep: bool) -> None:
    if asleep:
        for pid in pids_of(folder):
            os.kill(pid, signal.SIGSTOP)
    running.kill()
    running.wait()
    assert_no_process_is_left(folder, within_s=20)


def test_a_killed_worker_ends_the_supervisor_and_all(running: subprocess.Popen[str], folder: RunFolder) -> None:
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


@pytest.mark.parametrize(
    ("environ", "code", "told"),
    [
        ({"FAKE": "steps=4", "FAKE_RAISE": "0:DataError:no such file"}, 3, "trainkit.errors.DataError: no such file\n"),
        ({"TRAINKIT_RANK": "first"}, 2, "  TRAINKIT_RANK=first: must be a whole number, 0 or more. (environment)\n"),
    ],
)
def test_a_worker_by_hand_prints_its_error(folder: RunFolder, environ: dict[str, str], code: int, told: str) -> None:
    folder.path.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), str(folder.resolved)]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert done.stderr.endswith(told)


def test_a_worker_started_by_hand_that_is_not_the_chief_prints_its_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainkit.run.worker_main", str(tmp_path / "resolved.yaml")]
    place = {"TRAINKIT_RANK": "1", "TRAINKIT_RANKS": "2", "TRAINKIT_STORE": "127.0.0.1:1"}
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("worker:1, rank 1 of 2: its output stays in this terminal\n")
    assert done.returncode == 4, "there is no run"


@pytest.mark.parametrize(
    ("module", "absent"), [("worker_main", {"torch", "hydra", "omegaconf"}), ("runner", {"hydra", "omegaconf"})]
)
def test_the_shell_of_a_worker_imports_nothing_slow_and_a_worker_no_hydra(module: str, absent: set[str]) -> None:
    code = f"import sys, trainkit.run.{module}; sys.exit(bool({absent} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def listeners(port: int) -> list[str]:
    """The addresses that something listens on at this port, as /proc writes them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [words[1].partition(":")[0] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")]


def test_the_store_listens_on_loopback_only_and_every_attempt_has_its_own_keys() -> None:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    with HostedStore() as hosted:
        hosted.open()
        hosted.open()  # the second attempt's
        assert listeners(hosted.address[1]) == ["0100007F"]
        store = TCPStore(*hosted.address, is_master=False, timeout=timedelta(seconds=5))
        PrefixStore("attempt/0", store).set("address", "dead")
        assert not PrefixStore("attempt/1", store).check(["address"])
        del store


def test_who_comes_before_the_store_is_open_waits_and_one_that_was_never_opened_frees_its_port() -> None:
    with HostedStore() as hosted, socket.create_connection(hosted.address, timeout=60):
        assert hosted.address[0] == "127.0.0.1"
    assert listeners(hosted.address[1]) == []
