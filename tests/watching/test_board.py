"""A `trainkit watch` that hides the newest runs, shows a wrong remaining time or lets a file move the cursor is caught
here alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from trainkit.cli import main
from trainkit.cluster.host import Machine, ProcessId
from trainkit.verbs.looking.schema import schema_of
from trainkit.watching import board as boards
from trainkit.watching.board import Board
from trainkit.watching.screen import lines_of, show


def run_in(folder: Path, *, state: str = "running", last_step: object = 100, **more: object) -> Path:
    folder.mkdir(parents=True)
    machine, mark = Machine.here(), ProcessId.of(os.getpid())
    status = {
        "state": state, "step": 20, "last_step": last_step, "resumable": False, "updated": 1.0, "pid": mark.pid,
        "process_start": mark.started, "host": machine.host, "boot_id": machine.boot_id, "processes": machine.processes,
        **more,
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def test_a_run_shows_its_step_pace_and_newest_metrics(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "seconds": 1.0, "train/loss": 0.9, "samples_per_s": 640.0, "lr": 0.1},
        {"step": 10, "epoch": 1.0, "val/loss": 0.8},
        {"step": 20, "seconds": 2.0, "train/loss": 0.7, "samples_per_s": 650.0, "lr": 0.1, "memory": 1e9},
    ]
    (run_in(tmp_path / "digits/1") / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run,) = Board(tmp_path).read()["runs"]
    assert (run["folder"], run["state"], run["step"], run["last_step"]) == ("digits/1", "running", 20, 100)
    assert (run["remaining_s"], run["samples_per_s"]) == (8.0, 650.0)
    assert run["metrics"] == {"train/loss": 0.7, "val/loss": 0.8}


def test_a_run_that_a_time_ends_shows_the_time_that_is_left(tmp_path: Path) -> None:
    row = {"step": 10, "seconds": 1.0, "train/loss": 0.9}
    (run_in(tmp_path / "timed", last_step=None, stop_after_s=30.0) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run,) = Board(tmp_path).read()["runs"]
    assert (run["last_step"], run["remaining_s"]) == (None, 28.0)  # step 20 at a tenth of a second each


def test_running_ones_come_first_and_the_oldest_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment, (name, state) in enumerate({"a": "finished", "b": "running", "c": "failed"}.items()):
        os.utime(run_in(tmp_path / name, state=state) / "status.json", (moment, moment))
    assert Board(tmp_path).read()["runs"][0]["folder"] == "b"
    monkeypatch.setattr(boards, "_MOST_RUNS", 2)
    board = Board(tmp_path).read()
    assert ([run["folder"] for run in board["runs"]], board["not_shown"]) == (["b", "c"], 1)
    assert lines_of(board)[-1] == "  and 1 older ones"


def test_a_new_run_is_found_by_the_next_search(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 5.0, 10.0, 10.0])
    board = Board(tmp_path, clock=times.__next__)
    counts = [len(board.read()["runs"])]
    run_in(tmp_path / "a")
    counts += [len(board.read()["runs"]), len(board.read()["runs"])]
    assert counts == [0, 0, 1]


@pytest.mark.parametrize("last_step", ["x", True, 10**400, -5])
def test_crafted_files_break_nothing(tmp_path: Path, last_step: object) -> None:
    folder = run_in(tmp_path / "a\x1b[2J\u202eb", last_step=last_step)
    (folder / "metrics.jsonl").write_text('[]\n{\n{"train/loss": 1e400, "step": "x"}\n{"\\u001b[31m": 2}\n')
    os.mkfifo(folder / "result.json")
    (run_in(tmp_path / "b") / "metrics.jsonl").symlink_to("/dev/zero")
    board = Board(tmp_path).read()
    assert {run["folder"] for run in board["runs"]} == {"a?[2J?b", "b"}
    assert all(line.isprintable() for line in lines_of(board))


def test_piped_it_prints_the_runs_once_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    run_in(tmp_path / "a")
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["a", "running", "20", "20"]
    assert main(["watch", str(tmp_path), "--json"]) == 0
    jsonschema.Draft202012Validator(schema_of("watch")).validate(json.loads(capsys.readouterr().out))
    assert main(["watch", str(tmp_path / "absent"), "--json"]) == 2
    assert "absent: is not a folder" in capsys.readouterr().err


def test_the_terminal_is_drawn_until_it_is_interrupted(tmp_path: Path) -> None:
    run_in(tmp_path / "[bold]a[/bold]")
    console = Console(width=100, record=True, force_terminal=True, color_system=None, file=(tmp_path / "out").open("w"))

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    with console.file, pytest.raises(KeyboardInterrupt):
        show(console, Board(tmp_path).read, wait=stop)
    assert "[bold]a[/bold]" in console.export_text()
