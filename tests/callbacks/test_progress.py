from __future__ import annotations

from pathlib import Path

import pytest

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.progress import Progress


def test_a_pipe_gets_the_row_and_the_latest_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double(tmp_path, step=10, eval={"metric": "val/accuracy", "mode": "max"})
    progress = Progress(every_s=1e-9)
    progress.log(run, row(10))
    progress.eval_end(run, {"val/loss": 0.3, "val/accuracy": 0.9722})
    progress.run_end(run, {})
    assert capsys.readouterr().out.splitlines() == [
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
    found = [line.partition("  412 k")[0] for line in capsys.readouterr().out.splitlines()]
    assert found == [
        "step 80/100   80 %  val/loss 0.3000",
        "step 90/100   90 %  loss 0.5000  val/loss 0.3000 of step 80",
        "step 100/100  100 %  loss 0.5000  val/loss 0.2000",
    ]


def test_between_two_lines_nothing_is_printed_but_the_last_row_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, progress = run_double(tmp_path), Progress(every_s=1e9)
    for step in (10, 20, 100):
        run.state.step = step
        progress.log(run, row(step))
    progress.run_end(run, {})
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 10/100", "step 100/100"]


def test_the_metric_without_a_choice_is_the_validation_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, progress = run_double(tmp_path, step=10), Progress()
    progress.eval_end(run, {"val/loss": 0.25})
    progress.run_end(run, {})
    assert capsys.readouterr().out == "step 10/100   10 %  val/loss 0.2500\n"


def test_other_ranks_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, progress = run_double(tmp_path, is_owner=False), Progress()
    progress.log(run, row(10))
    progress.run_end(run, {})
    assert capsys.readouterr().out == ""
