from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks import plots
from trainkit.callbacks.every_run import MetricsFile
from trainkit.callbacks.plots import Plots
from trainkit.numerics.schedules import lr_points
from trainkit.report.drawing import draw


def test_a_run_leaves_its_plots(tmp_path: Path) -> None:
    run, file, drawn = run_double(tmp_path, step=10), MetricsFile(), Plots()
    drawn.log(run, row(10))
    file.log(run, row(10))
    file.eval_end(run, {"val/loss": 0.4, "val/accuracy": 0.9})
    drawn.eval_end(run, {})
    file.run_end(run, {})
    drawn.run_end(run, {})
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "loss.png", "lr.png"]


def test_a_plot_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, drawn = run_double(tmp_path), Plots()
    (tmp_path / "plots").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        drawn.log(run, row(1))
        drawn.run_end(run, {})
    (record,) = caplog.records
    assert record.getMessage().startswith("plots/lr.png: FileExistsError")


def test_the_metrics_are_drawn_anew_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(plots.Plots, "_start", lambda self, name, request: asked.append(request["draw"]))
    run, drawn = run_double(tmp_path), Plots(every_s=1e-9)
    drawn.run_start(run)
    assert asked == []
    drawn.log(run, row(1))
    drawn.log(run, row(2))
    drawn.eval_end(run, {})
    assert asked == ["lr", "metrics"]


def test_a_run_that_ends_before_its_first_row_has_the_curve_of_its_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(plots.Plots, "_start", lambda self, name, request: asked.append(request["draw"]))
    Plots().run_end(run_double(tmp_path), {})
    assert asked == ["lr"]


def test_each_of_several_optimizers_has_its_curve_of_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, Any]] = []
    monkeypatch.setattr(plots.Plots, "_start", lambda self, name, request: asked.append(request))
    run = run_double(tmp_path, num_steps=2)
    Plots().log(replace(run, rates={"body": run.rate, "head": replace(run.rate, peak=0.2)}), row(1))
    assert asked[0]["rates"] == {"body": [[0, 0.1], [1, 0.1]], "head": [[0, 0.2], [1, 0.2]]}
    draw(asked[0])
    assert (tmp_path / "plots/lr.png").exists()


def test_other_ranks_draw_nothing(tmp_path: Path) -> None:
    run, drawn = run_double(tmp_path, is_owner=False), Plots(every_s=1e-9)
    drawn.log(run, row(1))
    drawn.eval_end(run, {})
    drawn.run_end(run, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_steps", "steps"), [(1, [0]), (3, [0, 1, 2]), (601, None)])
def test_the_curve_has_the_first_and_the_last_step(num_steps: int, steps: list[int] | None) -> None:
    points = [step for step, _ in lr_points(lambda step: 0.1, num_steps)]
    assert points[0] == 0
    assert points[-1] == num_steps - 1
    assert len(points) == min(600, num_steps)
    assert steps is None or points == steps
