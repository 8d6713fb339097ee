"""A duration, quantity or share that rounds to the wrong unit, and a summary that differs between pipe and terminal,
are caught here alone.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainkit.report import tables
from trainkit.report.tables import is_terminal, print_closing, print_summary

ROWS = {"replicas": 2, "batch": "64 = 2 shards of 32", "warmup": None, "learning rate": "0.001"}
RESULT = {
    "status": "finished",
    "reason": "all steps done",
    "steps": 870,
    "seconds": 6.13,
    "seconds_total": 8.0,
    "metrics": {"val/loss": 0.07123, "val/accuracy": 0.9806},
    "best": "checkpoints/step_00000870",
    "resume": "python -m trainkit resume outputs/digits/1",
    "restarts": [{"kind": kind} for kind in ("all", "all", "lost", "alone")],
}


def test_the_summary_says_the_same_in_a_pipe_and_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ["digits", "  replicas       2", "  batch          64 = 2 shards of 32", "  learning rate  0.001"]
    notes = ["Markup such as [b] is text."]
    expected += [f"  note: {notes[0]}"]
    print_summary("digits", ROWS, notes=notes)
    assert capsys.readouterr().out.splitlines() == expected
    file = io.StringIO()
    monkeypatch.setattr(tables, "terminal_console", lambda: Console(file=file, width=30, force_terminal=True))
    print_summary("digits", ROWS, notes=notes)
    assert re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines() == expected


def closing(capsys: pytest.CaptureFixture[str], result: dict[str, Any], folder: Path) -> list[str]:
    print_closing(result, folder)
    return capsys.readouterr().out.splitlines()


def test_the_end_shows_result_folder_page_tensorboard_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/digits run")
    (folder / "tensorboard").mkdir(parents=True)
    restarts = "2 restarts, 1 restart without a replica that was lost, 1 task started again alone"
    expected = [
        "finished after 870 steps, 6.1 s of training (8.0 s in all): all steps done",
        "  result       val/loss 0.07123  val/accuracy 0.9806",
        f"  restarts     {restarts}: restarts in result.json",
        "  best         checkpoints/step_00000870",
        "  folder       outputs/digits run",
        "  page         outputs/digits run/report.html",
        "  tensorboard  tensorboard --logdir 'outputs/digits run/tensorboard'",
        "  resume       python -m trainkit resume outputs/digits/1",
    ]
    assert closing(capsys, {**RESULT, "page": True}, folder) == expected


def test_the_time_of_the_last_attempt_is_not_set_beside_that_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"status": "finished", "steps": 9, "seconds": 9.6, "seconds_total": 8.0}
    assert closing(capsys, result, tmp_path)[0] == "finished after 9 steps, 9.6 s of training"


def test_a_failed_run_says_why_and_names_no_tensorboard_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"status": "failed", "reason": "NaN at step 3", "steps": 3, "restarts": []}
    assert closing(capsys, result, tmp_path) == ["failed after 3 steps: NaN at step 3", f"  folder  {tmp_path}"]


def test_a_terminal_that_cannot_move_its_cursor_counts_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    for name, expected in (("xterm-256color", True), ("dumb", False)):
        monkeypatch.setenv("TERM", name)
        assert (is_terminal(terminal), is_terminal(io.StringIO())) == (expected, False)
