"""A worker, or its child, that lives on after Ctrl-C or after its supervisor was killed is caught here alone.
A second Ctrl-C that is swallowed, or an exit code of another signal, is caught here alone.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import trainkit
from tests.run.faking import alive, assert_no_process_is_left, launch, pids_of
from tests.support.present import present
from trainkit.errors import StopKind, status_of_error
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.signals import (
    EXIT_CODES,
    StopFlag,
    signal_of,
    stop_error,
    stop_signals,
    worker_signals,
)
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.sweeps.loop import signals_to
from trainkit.trainer.loop import StopSaveConsensus, StopSaveDecision
from trainkit.trainer.manifest import list_complete


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


def test_a_signal_stops_and_saves(running: subprocess.Popen[str], folder: RunFolder) -> None:
    running.send_signal(signal.SIGTERM)
    assert json.loads(running.communicate(timeout=60)[0].splitlines()[-1]) == {"status": "preempted", "attempt": 0}
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


def test_no_worker_outlives_its_supervisor(running: subprocess.Popen[str], folder: RunFolder) -> None:
    for pid in pids_of(folder):
        os.kill(pid, signal.SIGSTOP)  # none of them can see that it is alone
    running.kill()
    running.wait()
    assert_no_process_is_left(folder, within_s=20)


def test_the_signal_for_stacks_does_not_end_a_worker_that_only_starts(tmp_path: Path) -> None:
    exits: list[ProcessExit] = []
    with WorkerGroup(0, exits.append) as group:
        group.start(0, [sys.executable, "-c", ""], os.environ, tmp_path / "log")
        group.signal(signal.SIGUSR2)
        group.join()
    assert [event.code for event in exits] == [0]


@pytest.mark.parametrize(
    ("environ", "code", "message"),
    [
        ({"FAKE": "steps=4", "FAKE_RAISE": "0:DataError:no such file"}, 3, "trainkit.errors.DataError: no such file\n"),
        ({"TRAINKIT_RANK": "first"}, 2, "  TRAINKIT_RANK=first: must be a whole number, 0 or more. (environment)\n"),
    ],
)
def test_a_worker_by_hand_prints_its_error(folder: RunFolder, environ: dict[str, str], code: int, message: str) -> None:
    folder.path.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), str(folder.resolved)]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert done.stderr.endswith(message)


def test_a_worker_started_by_hand_that_is_not_the_chief_prints_its_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainkit.run.worker_main", str(tmp_path / "resolved.yaml")]
    address = {"TRAINKIT_RANK": "1", "TRAINKIT_RANKS": "2", "TRAINKIT_STORE": "127.0.0.1:1"}
    done = subprocess.run(command, env=os.environ | address, capture_output=True, text=True, timeout=60, check=False)
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
    return [fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")]


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


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGINT, "stopped", 130), (signal.SIGTERM, "preempted", 143), (signal.SIGHUP, "hangup", 129)],
)
def test_a_signal_becomes_a_reason_with_its_error_and_its_exit_code(number: int, reason: StopKind, code: int) -> None:
    with StopFlag() as stop:
        before = stop.requested
        interrupt(number)
    assert (before, stop.requested) == (None, reason)
    error = stop_error(reason, "asked to end")
    assert (signal_of(reason), error.exit_code, EXIT_CODES[reason]) == (number, code, code)
    assert status_of_error(error) == reason


def test_a_notice_of_a_scheduler_is_a_preemption() -> None:
    with StopFlag() as stop:
        interrupt(signal.SIGUSR1)
    assert stop.requested == "preempted"


def test_the_first_stop_reason_is_kept_and_reported_once_and_a_second_ctrl_c_interrupts_at_once() -> None:
    reasons: list[str] = []
    with StopFlag(reasons.append) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # a scheduler may repeat itself
            interrupt(number)
    assert (stop.requested, reasons) == ("preempted", ["preempted"])
    with StopFlag() as stop:
        interrupt(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGINT)
    assert stop.requested == "stopped"


def test_a_stop_overrides_a_change_of_size() -> None:
    with StopFlag(signals=worker_signals()) as stop:
        interrupt(signal.SIGWINCH)
        changed = stop.requested
        interrupt(signal.SIGINT)
        interrupt(signal.SIGWINCH)
    assert (changed, stop.requested) == ("resized", "stopped")
    assert set(worker_signals()) - set(stop_signals()) == {signal.SIGWINCH}


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with StopFlag():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_signal_that_was_held_back_arrives_when_the_flag_is_up() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        with StopFlag() as stop:
            assert stop.requested == "preempted"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_sighup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop, signals_to(lambda number: pytest.fail(str(number))):
            interrupt(signal.SIGHUP)
        assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


FORK = """
import multiprocessing, os, signal, time
from trainkit.run.signals import StopFlag
with StopFlag() as stop:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGHUP)
    time.sleep(0.1)
    print(child.is_alive())
    child.terminate()
    child.join(10)
    print(child.exitcode, stop.requested)
"""


def test_a_forked_child_survives_ctrl_c_and_hangup_and_obeys_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["True", "-15", "None"]


EXIT = """
import sys, threading, time
from trainkit.run.signals import exit_as_interpreter
left_open = open(sys.argv[1], "w")
left_open.write("kept")
threading.Thread(target=lambda: (time.sleep(0.05), left_open.write(" and joined"))).start()
exit_as_interpreter(3)
"""


def test_an_exit_without_freeing_objects_joins_threads_and_flushes_open_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "left")], timeout=30, check=False)
    assert (done.returncode, (tmp_path / "left").read_text()) == (3, "kept and joined")


def test_one_process_agrees_with_itself_and_asks_at_most_twice_as_many_steps_later() -> None:
    decision = StopSaveConsensus(LocalCollective(), lambda: "resized", lambda: True).ask()
    assert decision == StopSaveDecision(stop="resized", save=True)
    agreement, intervals = StopSaveConsensus(LocalCollective(), lambda: None), []
    for _ in range(4):
        assert agreement.ask() == StopSaveDecision(stop=None, save=False)
        intervals.append(agreement.interval)
    assert intervals == [2, 4, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize(("every_s", "saves"), [("1e-9", True), ("null", False)])
def test_a_run_saves_when_its_time_has_come(tmp_path: Path, every_s: str, saves: bool) -> None:
    keys = ("recipe=null", "steps=20", "callbacks=[]", "logger=[]", "eval.every_epochs=null", "checkpoint.keep_last=99")
    trainkit.train(trainkit.compose([*keys, f"checkpoint.every_s={every_s}"]), run_dir=tmp_path / "run")
    assert (len(list_complete(tmp_path / "run/checkpoints")) > 1) == saves
