import os
import signal
import subprocess
import sys
import threading

import pytest

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
from trainkit.sweeps.loop.processes import signals_to


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, "stopped"),
        (signal.SIGTERM, "preempted"),
        (signal.SIGUSR1, "preempted"),
        (signal.SIGHUP, "hangup"),
    ],
)
def test_a_signal_becomes_a_reason(number: int, reason: str) -> None:
    with StopFlag() as stop:
        assert stop.requested is None
        interrupt(number)
        assert stop.requested == reason


def test_the_second_ctrl_c_interrupts_at_once() -> None:
    with StopFlag() as stop:
        interrupt(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGINT)
    assert stop.requested == "stopped"


def test_a_scheduler_may_repeat_itself() -> None:
    with StopFlag() as stop:
        for _ in range(3):
            interrupt(signal.SIGTERM)
    assert stop.requested == "preempted"


def test_the_first_stop_reason_is_kept_and_reported_once() -> None:
    told: list[str] = []
    with StopFlag(told.append) as stop:
        interrupt(signal.SIGTERM)
        interrupt(signal.SIGINT)
    assert (stop.requested, told) == ("preempted", ["preempted"])


def test_a_stop_overrides_a_change_of_size() -> None:
    with StopFlag(signals=worker_signals()) as stop:
        interrupt(signal.SIGWINCH)
        changed = stop.requested
        interrupt(signal.SIGINT)
        interrupt(signal.SIGWINCH)
    assert (changed, stop.requested) == ("resized", "stopped")


def test_only_a_worker_with_a_supervisor_listens_for_a_change_of_size() -> None:
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


def test_outside_the_main_thread_the_flag_can_only_be_asked() -> None:
    found = []

    def use() -> None:
        with StopFlag() as stop:
            stop.request("stopped")
            found.append(stop.requested)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == ["stopped"]


def test_a_sighup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop, signals_to(lambda number: pytest.fail(str(number))):
            interrupt(signal.SIGHUP)
        assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_every_reason_has_its_signal_its_error_and_its_exit_code() -> None:
    known: tuple[tuple[Reason, int, int], ...] = (("stopped", 2, 130), ("preempted", 15, 143), ("hangup", 1, 129))
    for reason, number, code in known:
        error = stop_error(reason, "asked to end")
        assert (signal_of(reason), error.exit_code, EXIT_CODES[reason]) == (number, code, code)
        assert status_of_error(error) == reason


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
