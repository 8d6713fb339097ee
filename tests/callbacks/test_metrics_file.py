from __future__ import annotations

import json
import math
from pathlib import Path

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.every_run import MetricsFile, keep_until
from trainkit.objectives.tables import Table


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_and_evaluations_are_lines_of_json(tmp_path: Path) -> None:
    run, file = run_double(tmp_path, step=10), MetricsFile()
    file.log(run, {"step": 10, "train/loss": math.nan, "lr": 0.1})
    file.eval_end(run, {"val/loss": 0.25})
    file.run_end(run, {})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 10, "train/loss": null, "lr": 0.1}\n{"step": 10, "epoch": 0.1, "val/loss": 0.25}\n'
    )


def test_rows_are_written_once_a_second(tmp_path: Path) -> None:
    now, run = [0.0], run_double(tmp_path)
    file = MetricsFile(clock=lambda: now[0])
    for step, at in [(1, 0.0), (2, 0.5), (3, 0.9)]:
        now[0] = at
        file.log(run, row(step))
    assert steps_in(tmp_path) == [1]
    now[0] = 1.0
    file.log(run, row(4))
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_no_row_before_a_checkpoint_is_lost(tmp_path: Path) -> None:
    run, file = run_double(tmp_path), MetricsFile(clock=lambda: 0.0)
    file.log(run, row(1))
    file.log(run, row(2))
    assert file.state() == {}
    assert steps_in(tmp_path) == [1, 2]


def test_a_resumed_run_makes_no_row_twice(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row(step))}\n" for step in (10, 20, 30)) + '{"st')
    MetricsFile().run_start(run_double(tmp_path, step=20))
    assert steps_in(tmp_path) == [10, 20]


def test_a_run_that_starts_over_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[1]\n{"lr": 1}\n')
    keep_until(tmp_path / "metrics.jsonl", 5)
    assert steps_in(tmp_path) == [0]
    keep_until(tmp_path / "metrics.jsonl", 0)
    assert steps_in(tmp_path) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run, file = run_double(tmp_path, is_owner=False), MetricsFile()
    file.run_start(run)
    file.log(run, row(1))
    file.run_end(run, {})
    assert list(tmp_path.iterdir()) == []


def test_tables_are_lines_of_json_and_a_resumed_run_drops_those_to_come(tmp_path: Path) -> None:
    table = Table(columns=("class", "recall"), rows=(("cat", 0.5), ("dog", math.nan)))
    for step in (10, 20):
        file = MetricsFile()
        file.eval_tables(run_double(tmp_path, step=step), {"val/each": table})
        file.run_end(run_double(tmp_path), {})
    MetricsFile().run_start(run_double(tmp_path, step=10))
    assert (tmp_path / "tables.jsonl").read_text() == (
        '{"step": 10, "epoch": 0.1, "name": "val/each", "columns": ["class", "recall"], '
        '"rows": [["cat", 0.5], ["dog", null]]}\n'
    )
