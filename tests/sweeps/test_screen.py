"""What a running sweep shows: a share of a job that stops early, told as one of its whole length, is caught here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from trainkit.sweeps.results.metric_stream import MetricRows, Progress, Watch, last_line
from trainkit.sweeps.screen import JobLine, State, View, table_of


def shown(view: View, height: int = 20) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(table_of(view, height=height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def lines(*states: State) -> list[JobLine]:
    return [JobLine(name=str(number), label=f"seed={number}", state=state) for number, state in enumerate(states)]


def test_the_table_tells_how_far_each_job_is() -> None:
    running, done = lines("running", "done")
    running.progress = Progress(step=1500, done=0.25, metric=0.9123456, loss=0.3, remaining_s=75.0)
    done.progress, done.seconds = Progress(step=6000, done=1.0, metric=0.95, loss=0.1), 8.0
    view = View(lines=[running, done], queued=6, in_use=1, slots=2, metric="val/accuracy")
    assert shown(view) == [
        "1 done, 1 running, 6 queued, 1 of 2 slots in use",
        "job  state           step  val/accuracy  loss   left  overrides",
        "0    running  1,500  25 %        0.9123   0.3   1:15  seed=0",
        "1    done     6,000 100 %          0.95   0.1  8.0 s  seed=1",
    ]


def test_where_there_is_little_room_those_that_run_and_that_failed_are_shown() -> None:
    view = View(lines=lines("done", "failed", "done", "running", "done"), queued=None, in_use=1, slots=1)
    head, _, *rows = shown(view, height=9)
    assert head == "3 done, 1 running, 1 failed, 1 of 1 slots in use, 2 not shown"
    assert [row.split()[:2] for row in rows] == [["1", "failed"], ["3", "running"], ["4", "done"]]


def watched(folder: Path, config: str, *rows: dict[str, Any]) -> Watch:
    (folder / "resolved.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Watch(folder)


def test_progress_is_read_from_the_newest_rows(tmp_path: Path) -> None:
    first = {"step": 10, "epoch": 1.0, "val/accuracy": 0.8, "val/loss": 0.7}
    second = {"step": 20, "epoch": 2.0, "seconds": 5.0, "train/loss": 0.5}
    watch = watched(tmp_path, "{epochs: 4, eval: {metric: val/accuracy}}", first, second)
    assert watch.look() == Progress(step=20, done=0.5, metric=0.8, loss=0.5, remaining_s=5.0)
    assert watch.goal == "val/accuracy"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("x" * 10_000 + "\n" + json.dumps({"step": 30, "epoch": 3.0, "seconds": 7.5}) + '\n{"step": 4')
    assert watch.look() == Progress(step=30, done=0.75, metric=0.8, loss=0.5, remaining_s=2.5)


def test_rows_that_a_resumed_job_writes_again_are_read_again(tmp_path: Path) -> None:
    watched(tmp_path, "{}", {"step": 1, "val/loss": 0.5}, {"step": 2, "val/loss": 0.4})
    rows = MetricRows(tmp_path / "metrics.jsonl", "val/loss")
    assert rows.new() == [(1, 0.5), (2, 0.4)]
    watched(tmp_path, "{}", {"step": 1, "val/loss": 0.6})
    assert rows.new() == [(1, 0.6)]


def test_a_job_that_stops_early_is_done_where_it_stops(tmp_path: Path) -> None:
    assert watched(tmp_path, "{steps: 100, stop_at_step: 40}", {"step": 10}).look().done == 0.25
    assert Watch(tmp_path / "absent").look() == Progress()
    assert last_line(tmp_path / "absent") == ""
