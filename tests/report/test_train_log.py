"""A `train.log` that holds a secret or control character, loses a line to a kill or follows a link, and a traceback
that is cut at the line of the user are caught here alone.
"""
# ruff: noqa: T201 - what is printed is what is tested

from __future__ import annotations

import errno
import os
import pty
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from rich.console import Console

from trainkit.callbacks.progress import Reading, live_line
from trainkit.errors import TrainingError
from trainkit.redaction import remember
from trainkit.report.tracebacks import one_screen
from trainkit.report.train_log import TrainLog, plain, recorded_output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def test_the_log_holds_both_streams_without_secrets_and_control_characters(log: Path) -> None:
    remember("s3cr3t-canary")
    with recorded_output(log):
        sys.stdout.write("\x1b[1mloss\x1b[0m 0.5\r\n")
        print("key", "s3cr3t-canary")  # in three writes
        print("\x1b]0;owned\x07name", file=sys.stderr)
        sys.stdout.write("s3cr3t-")
        sys.stdout.write("canary")
    assert log.read_text() == "loss 0.5\nkey (redacted)\nname\n(redacted)\n"


def test_a_line_is_in_the_file_at_once(log: Path) -> None:
    """What a SIGKILL at this moment leaves."""
    with recorded_output(log):
        print("first")
        assert log.read_text() == "first\n"


def test_a_line_is_what_a_person_read() -> None:
    lines = {
        "plain": "plain",
        "\x1b[1;32mgreen\x1b[0m\r": "green",
        "10 %\r50 %\r100 %": "100 %",
        "a\tc": "a       c",
        "\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
        "bell\x07 null\x00 escape\x1b c1\x9b2J": "bell null escapec12J",
        "reversed \u202eevil\u202c": "reversed evil",
    }
    assert {line: plain(line) for line in lines} == lines


def test_a_line_may_come_in_pieces_and_one_without_an_end_takes_bounded_memory(log: Path) -> None:
    with recorded_output(log):
        for piece in ("a\x1b", "[3", "1mb", "\n"):
            sys.stdout.write(piece)
        for number in range(20_000):
            sys.stdout.write(f"\r{number} of 20,000")
        assert len(cast("Any", sys.stdout)._tail) < 1 << 15
        print()
        sys.stdout.write("x" * 100_000)
    first, second, *pieces = log.read_text().splitlines()
    assert (first, second, sum(map(len, pieces))) == ("ab", "19999 of 20,000", 100_000)


def test_a_second_run_appends_below_a_line(log: Path) -> None:
    for text in ("one", "two"):
        with recorded_output(log, separated=True):
            print(text)
    first, line, second = log.read_text().splitlines()
    assert (first, second, line[:6], line[-6:]) == ("one", "two", "----- ", " -----")


def test_an_error_is_written_as_the_command_line_shows_it(log: Path) -> None:
    opened = TrainLog(log)
    for error in (TrainingError("step 3: \x1b[31mno\x1b[0m"), KeyboardInterrupt(), ValueError("of a user")):
        opened.write_error(error)
    opened.close()
    assert log.read_text().splitlines() == ["step 3: no", "stopped", "ValueError: of a user"]


def test_lines_lost_to_a_full_disk_are_counted_in_the_log_later(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with recorded_output(log) as opened:
        print("before")
        with monkeypatch.context() as full:
            full.setattr(os, "write", refuse)
            opened.write(["lost", "lost too"])
        print("after")
    assert log.read_text().splitlines() == ["before", "(2 lines before this one could not be written)", "after"]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_only_a_regular_file_is_written_to(log: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another run's folder must not make a resumed run write into another file, or wait."""
    victim = log.with_name("victim")
    victim.write_text("mine\n")
    log.symlink_to(victim) if kind == "link" else os.mkfifo(log)
    with recorded_output(log, separated=True):
        print("line")
    assert victim.read_text() == "mine\n"
    assert capsys.readouterr().err == f"{log} is not a regular file, and this run writes no log.\n"


def test_a_terminal_that_was_closed_ends_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with recorded_output(log):
            print("seen")
            os.close(leader)
            for number in range(3):
                print(number, flush=True)
        monkeypatch.undo()
    assert log.read_text().split() == ["seen", "0", "1", "2"]


def test_a_stream_that_the_caller_has_closed_ends_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with recorded_output(log):
        print("seen", flush=True)
    assert log.read_text() == "seen\n"


def test_the_bar_of_a_terminal_is_in_the_log_as_lines(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with recorded_output(log):
            Console().print("[bold]summary[/bold]")
            line = live_line(every_s=60.0, step_now=lambda: 3)
            for step in range(1, 5):
                line.update(Reading(step=step, num_steps=4))
                print(f"callback at {step}")
            line.close()
            print("end")
        monkeypatch.undo()
    assert "\x1b[" in os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert log.read_text().splitlines() == [
        "summary", "step 1/4   25 %", *(f"callback at {step}" for step in range(1, 5)), "step 4/4  100 %", "end",
    ]  # fmt: skip


HEAD = ["rank 1 failed in step 3 (forward): ValueError: bad.", "Traceback (most recent call last):"]
USER = ['  File "/home/u/model.py", line 7, in f', "    raise ValueError(shape)", "    ^^^^"]
LIBRARY = ['  File "/usr/lib/site-packages/torch/nn.py", line 7, in f', "    call()", "    ^^^^"] * 20
LONG = [f"ValueError: {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("frames", "message"),
    [([*LIBRARY, *USER], ["bad", "rank 1"]), ([*LIBRARY, *USER, *LIBRARY], ["bad"]), ([*LIBRARY, *USER], LONG)],
)
def test_the_users_line_and_both_ends_of_the_message_stay_in_one_screen(frames: list[str], message: list[str]) -> None:
    lines = one_screen("\n".join([*HEAD, *frames, *message]), 31).splitlines()
    assert len(lines) <= 31
    assert lines[:2] == HEAD
    assert any(line.startswith("  ... ") for line in lines)
    assert (USER[1] in lines, message[0] in lines, lines[-1]) == (True, True, message[-1])
    short = "\n".join([*HEAD, *USER, "ValueError: bad"])
    assert one_screen(short, 10) == short
