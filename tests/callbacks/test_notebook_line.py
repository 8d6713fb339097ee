from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainkit.callbacks.progress import PlainLine, live_line
from trainkit.callbacks.screen.notebook import LiveHtml, NotebookLine
from trainkit.callbacks.screen.reading import Reading

HALF = Reading(step=10, num_steps=20, loss=0.5, metric=("val/<b>acc", 0.9), remaining_s=75.0)


class Cell:
    """The output of a cell: what it showed, in order."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.outputs = 0

    def __call__(self, shown: object, *, display_id: bool) -> Any:
        assert display_id
        self.outputs += 1
        self.shown.append(shown)
        return SimpleNamespace(update=self.shown.append)


def notebook(monkeypatch: pytest.MonkeyPatch, cell: Cell, shell: object) -> None:
    module, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(module).update(get_ipython=lambda: shell, display=display)
    vars(display).update(display=cell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)


def test_a_notebook_gets_a_bar_whose_texts_are_no_html() -> None:
    html = LiveHtml(HALF)._repr_html_()
    assert "<progress max='1' value='0.5000' aria-label='step 10 of 20'></progress>" in html
    assert "val/&lt;b&gt;acc 0.9000" in html
    assert "1:15 left" in html
    assert repr(LiveHtml(HALF)).startswith("10/20  loss 0.5000")


def test_one_output_is_replaced_twice_a_second_at_most() -> None:
    cell, now = Cell(), [0.0]
    line = NotebookLine(display=cell, clock=lambda: now[0])
    for now[0] in (0.0, 0.1, 0.4, 0.6, 0.7):
        line.update(Reading(step=round(10 * now[0]), num_steps=20))
    line.close()
    line.close()
    assert [repr(one) for one in cell.shown] == ["0/20", "6/20", "7/20"]
    assert cell.outputs == 1


def test_a_kernel_shows_html_and_a_shell_in_a_terminal_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    notebook(monkeypatch, cell, SimpleNamespace(kernel=object()))
    live_line(every_s=5.0, step_now=lambda: 0).update(HALF)
    assert len(cell.shown) == 1
    notebook(monkeypatch, cell, SimpleNamespace())
    assert isinstance(live_line(every_s=5.0, step_now=lambda: 0), PlainLine)
