"""A progress line that shows the value of another step, colours a pipe, or is printed too often or not at the end is
caught here alone.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.progress import PlainLine, Progress, TerminalLine, live_line
from trainkit.callbacks.screen.notebook import LiveHtml, NotebookLine
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


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_pipe_gets_the_row_and_the_latest_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(tmp_path, step=10, eval={"metric": "val/accuracy", "mode": "max"})
    progress = Progress(every_s=1e-9)
    progress.log(run, row(10))
    progress.eval_end(run, {"val/loss": 0.3, "val/accuracy": 0.9722})
    progress.run_end(run, {})
    assert printed(capsys) == [
        "step 10/100   10 %  loss 0.5000  412 k samples/s  data wait 3 %",
        "step 10/100   10 %  loss 0.5000  val/accuracy 0.9722  412 k samples/s  data wait 3 %",
    ]


def test_the_last_line_comes_once_with_its_evaluation_and_earlier_values_name_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, progress = run_double(tmp_path, step=80, num_steps=100), Progress(every_s=1e-9)
    progress.eval_end(run, {"step": 80, "val/loss": 0.3})
    for step in (90, 100):
        run.state.step = step
        progress.log(run, row(step))
    progress.eval_end(run, {"step": 100, "val/loss": 0.2})
    progress.run_end(run, {})
    assert [line.partition("  412 k")[0] for line in printed(capsys)] == [
        "step 80/100   80 %  val/loss 0.3000",
        "step 90/100   90 %  loss 0.5000  val/loss 0.3000 of step 80",
        "step 100/100  100 %  loss 0.5000  val/loss 0.2000",
    ]


def test_the_last_row_is_printed_though_no_line_is_due_and_other_ranks_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_owner, lines in ((True, ["step 10/100", "step 100/100"]), (False, [])):
        run, progress = run_double(tmp_path, is_owner=is_owner), Progress(every_s=1e9)
        for step in (10, 20, 100):
            run.state.step = step
            progress.log(run, row(step))
        progress.run_end(run, {})
        assert [line.split("  ")[0] for line in printed(capsys)] == lines


def test_a_plain_line_shows_all_known_values_and_leaves_out_the_others() -> None:
    assert plain_text(READING) == (
        "step 1,240/5,800   21 %  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left"
    )
    assert plain_text(Reading(step=1, num_steps=10)) == "step 1/10   10 %"


def test_a_narrow_terminal_drops_what_matters_least() -> None:
    texts = {
        100: "1,250/5,800  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left",
        66: "1,250/5,800  loss 0.1235  accuracy 0.9722  412 k/s  wait 3 %  0:12",
        65: "1,250/5,800  loss 0.1235  accuracy 0.9722  412 k/s  0:12",
        50: "1,250/5,800  loss 0.1235  accuracy 0.9722  0:12",
        10: "1,250/5,800",
    }
    for width, text in texts.items():
        assert "  ".join(part for part, _ in terminal_parts(READING, step=1250, width=width)) == text


def test_plain_lines_come_every_few_seconds_and_the_last_always() -> None:
    now, stream = [0.0], io.StringIO()
    line = PlainLine(every_s=5.0, stream=stream, clock=lambda: now[0])
    for step in range(1, 10):
        now[0] = step * 2.0
        line.update(Reading(step=step, num_steps=9))
    line.close()
    line.close()
    shown = [text.split()[1] for text in stream.getvalue().splitlines()]
    assert shown == ["1/9", "4/9", "7/9", "9/9"]


def drawn() -> str:
    """What a terminal with colours is sent."""
    file = io.StringIO()
    console = Console(file=file, width=110, force_terminal=True, color_system="truecolor")
    line = TerminalLine(console=console, step_now=lambda: 1250)
    line.update(READING)
    line.close()
    return file.getvalue()


def test_the_bar_shows_the_step_of_this_moment_and_no_colours_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;m]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(drawn())
    assert "1,250/5,800  loss 0.1235" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn())


def test_what_is_piped_has_no_colours_though_they_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    line = live_line(every_s=5.0, step_now=lambda: 0)
    line.update(READING)
    line.close()
    assert isinstance(line, PlainLine)
    assert "\x1b" not in capsys.readouterr().out


class Cell:
    """The output of a cell of a notebook: what it showed, in order."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.outputs = 0

    def __call__(self, shown: object, *, display_id: bool) -> Any:
        assert display_id
        self.outputs += 1
        self.shown.append(shown)
        return SimpleNamespace(update=self.shown.append)


def test_a_notebook_gets_a_bar_whose_texts_are_no_html() -> None:
    reading = Reading(step=10, num_steps=20, loss=0.5, metric=("val/<b>acc", 0.9), remaining_s=75.0)
    html = LiveHtml(reading)._repr_html_()
    assert "<progress max='1' value='0.5000' aria-label='step 10 of 20'></progress>" in html
    assert "val/&lt;b&gt;acc 0.9000" in html
    assert "1:15 left" in html
    assert repr(LiveHtml(reading)).startswith("10/20  loss 0.5000")


def test_one_output_of_a_notebook_is_replaced_twice_a_second_at_most() -> None:
    cell, now = Cell(), [0.0]
    line = NotebookLine(display=cell, clock=lambda: now[0])
    for now[0] in (0.0, 0.1, 0.4, 0.6, 0.7):
        line.update(Reading(step=round(10 * now[0]), num_steps=20))
    line.close()
    line.close()
    assert [repr(one) for one in cell.shown] == ["0/20", "6/20", "7/20"]
    assert cell.outputs == 1


def test_a_kernel_shows_html_and_a_shell_in_a_terminal_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module, display, cell = ModuleType("IPython"), ModuleType("IPython.display"), Cell()
    vars(module).update(get_ipython=lambda: SimpleNamespace(kernel=object()), display=display)
    vars(display).update(display=cell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    live_line(every_s=5.0, step_now=lambda: 0).update(READING)
    assert len(cell.shown) == 1
    vars(module).update(get_ipython=SimpleNamespace)
    assert isinstance(live_line(every_s=5.0, step_now=lambda: 0), PlainLine)
