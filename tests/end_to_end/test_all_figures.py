"""A figure of README that is lost, or a ratio of other rounds, when its table is written anew, is caught here."""

from __future__ import annotations

from benchmarks import all as every

ROW = every.Row(key="two", what="time of it", by="a loop", contenders={}, inverse=True)


def test_a_ratio_is_taken_within_a_round() -> None:
    seconds = {"base": [4.0, 8.0], "trainkit": [2.0, 2.0], "DDP": [4.0, 2.0]}
    assert every.ratios(ROW, seconds) == {"trainkit": [2.0, 4.0], "DDP": [1.0, 4.0]}


def test_the_table_of_readme_keeps_what_was_not_measured() -> None:
    text = every.README.read_text()
    first = every.rewritten(
        text, [every.cells(ROW, {"trainkit": [0.5], "DDP": [2.0]}, "x")], absent="Not installed: a."
    )
    again = every.rewritten(first, [every.cells(ROW, {"trainkit": [0.25]}, "x")], absent="")
    assert "| time of it | a loop | 0.50 | DDP 2.00 | x, 20" in first
    assert "Not installed: a." in first
    assert "Not installed" not in again
    assert [line for line in again.splitlines() if "time of it" not in line] == text.splitlines()
