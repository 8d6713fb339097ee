"""A second Ctrl-C that is swallowed, or an exit code of another signal, is caught here alone."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import trainkit
from trainkit.errors import status_of_error
from trainkit.run.signals import (
    EXIT_CODES,
    Reason,
    StopFlag,
    signal_of,
    stop_error,
    stop_signals,
    worker_signals,
)
from trainkit.strategies.collectives import LocalCollective
from trainkit.sweeps.loop.processes import signals_to
from trainkit.trainer.loop import StopSaveConsensus, StopSaveDecision
from trainkit.trainer.manifest import list_complete


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGINT, "stopped", 130), (signal.SIGTERM, "preempted", 143), (signal.SIGHUP, "hangup", 129)],
)
def test_a_signal_becomes_a_reason_with_its_error_and_its_exit_code(number: int, reason: Reason, code: int) -> None:
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
    told: list[str] = []
    with StopFlag(told.append) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # a scheduler may repeat itself
            interrupt(number)
    assert (stop.requested, told) == ("preempted", ["preempted"])
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


def test_one_process_agrees_with_itself_and_asks_at_most_twice_as_many_steps_later() -> None:
    asked = StopSaveConsensus(LocalCollective(), lambda: "resized", lambda: True).ask()
    assert asked == StopSaveDecision(stop="resized", save=True)
    agreement, intervals = StopSaveConsensus(LocalCollective(), lambda: None), []
    for _ in range(4):
        assert agreement.ask() == StopSaveDecision(stop=None, save=False)
        intervals.append(agreement.interval)
    assert intervals == [2, 4, 8, 16]


@pytest.mark.parametrize(("every_s", "saves"), [("1e-9", True), ("null", False)])
def test_a_run_saves_when_its_time_has_come(tmp_path: Path, every_s: str, saves: bool) -> None:
    keys = ("recipe=null", "steps=20", "callbacks=[]", "logger=[]", "eval.every_epochs=null", "checkpoint.keep_last=99")
    trainkit.train(trainkit.compose([*keys, f"checkpoint.every_s={every_s}"]), run_dir=tmp_path / "run")
    assert (len(list_complete(tmp_path / "run/checkpoints")) > 1) == saves
