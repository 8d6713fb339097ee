from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from trainkit.callbacks.progress import PlainLine, TerminalLine, live_line
from trainkit.callbacks.screen.reading import Reading, plain_text, terminal_parts

READING = Reading(
    step=1240,
    num_steps=5800,
    loss=0.1234567,
    metric=("val/accuracy", 0.9722),
    samples_per_s=412_345.0,
    data_wait=0.031,
    remaining_s=12.3,
)


def words(width: int) -> str:
    return "  ".join(text for text, _ in terminal_parts(READING, step=1250, width=width))


def test_a_plain_line_shows_all_known_values() -> None:
    assert plain_text(READING) == (
        "step 1,240/5,800   21 %  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left"
    )


def test_a_plain_line_leaves_out_what_is_unknown() -> None:
    assert plain_text(Reading(step=1, num_steps=10)) == "step 1/10   10 %"


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (100, "1,250/5,800  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left"),
        (66, "1,250/5,800  loss 0.1235  accuracy 0.9722  412 k/s  wait 3 %  0:12"),
        (65, "1,250/5,800  loss 0.1235  accuracy 0.9722  412 k/s  0:12"),
        (50, "1,250/5,800  loss 0.1235  accuracy 0.9722  0:12"),
        (10, "1,250/5,800"),
    ],
)
def test_a_narrow_terminal_drops_what_matters_least(width: int, text: str) -> None:
    assert words(width) == text


def test_plain_lines_come_every_few_seconds_and_the_last_always() -> None:
    now, stream = [0.0], io.StringIO()
    line = PlainLine(every_s=5.0, stream=stream, clock=lambda: now[0])
    for step in range(1, 8):
        now[0] = step * 2.0
        line.update(Reading(step=step, num_steps=7))
    line.close()
    line.close()
    assert stream.getvalue().splitlines() == [
        "step 1/7   14 %",
        "step 4/7   57 %",
        "step 7/7  100 %",
    ]


def test_the_last_line_is_printed_though_none_was_due() -> None:
    stream = io.StringIO()
    line = PlainLine(every_s=5.0, stream=stream, clock=lambda: 0.0)
    line.update(Reading(step=1, num_steps=2))
    line.update(Reading(step=2, num_steps=2))
    line.close()
    assert stream.getvalue().splitlines() == ["step 1/2   50 %", "step 2/2  100 %"]


def test_the_bar_shows_the_step_of_this_moment() -> None:
    file = io.StringIO()
    console = Console(file=file, width=110, force_terminal=True, color_system=None)
    line = TerminalLine(console=console, step_now=lambda: 1250)
    line.update(READING)
    line.close()
    assert "1,250/5,800  loss 0.1235  val/accuracy 0.9722" in file.getvalue()


def test_a_pipe_gets_plain_lines() -> None:
    assert isinstance(live_line(every_s=5.0, step_now=lambda: 0), PlainLine)


def test_no_color_takes_the_colours_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        file = io.StringIO()
        console = Console(file=file, width=110, force_terminal=True, color_system="truecolor")
        line = TerminalLine(console=console)
        line.update(READING)
        line.close()
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;m]")
    assert colour.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(drawn())


def test_what_is_piped_has_no_colours_though_they_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    line = live_line(every_s=5.0, step_now=lambda: 0)
    line.update(READING)
    line.close()
    assert "\x1b" not in capsys.readouterr().out
