"""A row of `metrics.jsonl` or `tables.jsonl` that a resume loses or makes twice is caught here alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.every_run import MetricsFile, keep_until
from trainkit.objectives.tables import Table


def steps_in(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_rows_evaluations_and_tables_are_lines_of_json(tmp_path: Path) -> None:
    run, file = run_double(tmp_path, step=10), MetricsFile()
    table = Table(columns=("class", "recall"), rows=(("cat", 0.5), ("dog", math.nan)))
    file.log(run, {"step": 10, "train/loss": math.nan, "lr": 0.1})
    file.eval_end(run, {"val/loss": 0.25})
    file.eval_tables(run, {"val/each": table})
    file.run_end(run, {})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 10, "train/loss": null, "lr": 0.1}\n{"step": 10, "epoch": 0.1, "val/loss": 0.25}\n'
    )
    assert (tmp_path / "tables.jsonl").read_text() == (
        '{"step": 10, "epoch": 0.1, "name": "val/each", "columns": ["class", "recall"], '
        '"rows": [["cat", 0.5], ["dog", null]]}\n'
    )


def test_rows_are_written_once_a_second_and_before_a_checkpoint(tmp_path: Path) -> None:
    now, run = [0.0], run_double(tmp_path)
    file = MetricsFile(clock=lambda: now[0])
    for step, now[0], written in ((1, 0.0, [1]), (2, 0.5, [1]), (3, 0.9, [1]), (4, 1.0, [1, 2, 3, 4])):
        file.log(run, row(step))
        assert steps_in(tmp_path) == written
    file.log(run, row(5))
    assert file.state() == {}
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_a_resumed_run_drops_the_rows_to_come_and_what_is_no_row(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "tables.jsonl"):
        lines = "".join(f"{json.dumps(row(step))}\n" for step in (0, 10, 20, 30))
        (tmp_path / name).write_text(lines + '[1]\n{"lr": 1}\n{"st')
    MetricsFile().run_start(run_double(tmp_path, step=20))
    assert steps_in(tmp_path) == steps_in(tmp_path, "tables.jsonl") == [0, 10, 20]
    keep_until(tmp_path / "metrics.jsonl", 0)  # it starts over
    assert steps_in(tmp_path) == []
