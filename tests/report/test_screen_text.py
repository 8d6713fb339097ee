"""A `train.log` that holds a control character, or loses or repeats what a terminal showed, is caught here alone."""

from __future__ import annotations

from itertools import count

from trainkit.report.train_log import ScreenText


def test_a_line_is_what_a_person_read() -> None:
    lines = {
        "plain\n": ["plain"],
        "\x1b[1;32mgreen\x1b[0m\r\n": ["green"],
        "10 %\r50 %\r100 %\n": ["100 %"],
        "long line\rshort\x1b[K\n": ["short"],
        "a\tb\bc\n": ["a       c"],
        "\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n": ["link"],
        "bell\x07 null\x00 escape\x1b c1\x9b2J\n": ["bell null escapec12J"],
        "reversed \u202eevil\u202c\n": ["reversed evil"],
        "no end": [],
    }
    assert {text: ScreenText().feed(text) for text in lines} == lines


def test_a_sequence_may_come_in_pieces() -> None:
    screen = ScreenText()
    assert [screen.feed(piece) for piece in ("a\x1b", "[3", "1mb", "\n")] == [[], [], [], ["ab"]]


def test_a_table_that_is_redrawn_is_written_once_and_what_is_said_above_it_too() -> None:
    """Live tables of rich: up, erase, what was printed, and the rows again."""
    screen = ScreenText(clock=count(0, 0.001).__next__)
    lines = screen.feed("row 1: 0\nrow 2: 0")
    for number in range(1000):
        said = f"said {number}\n" if number % 100 == 0 else ""
        lines += screen.feed(f"\r\x1b[2K\x1b[1A\x1b[2K{said}row 1: {number}\nrow 2: {number}")
    lines += screen.finish()
    assert [line for line in lines if line.startswith("said")] == [f"said {number}" for number in range(0, 1000, 100)]
    assert lines[-2:] == ["row 1: 999", "row 2: 999"]
    assert len(lines) < 20


def test_lines_after_a_table_are_not_held_back() -> None:
    now = [0.0]
    screen = ScreenText(clock=lambda: now[0])
    assert screen.feed("a\nb\n\x1b[2A\x1b[2KA\n\x1b[2KB\n") == ["a", "b"]
    now[0] = 3.0
    assert screen.feed("next\n") == ["A", "B", "next"]


def test_text_without_an_end_takes_bounded_memory() -> None:
    screen = ScreenText()
    lines = [line for _ in range(100) for line in screen.feed("x" * 1000)]
    assert sum(map(len, lines)) > 80_000
    assert len(screen.finish()[0]) < 1 << 15
