from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainkit.report.curves import Curve, draw_lr, draw_metrics, read_curves


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_is_averaged_and_keeps_its_mean() -> None:
    curve = Curve.of([(step, float(step % 2)) for step in range(6000)])
    assert len(curve.thinned().steps) == 1500
    assert curve.thinned().values.tolist() == [0.5] * 1500
    assert curve.thinned().steps[:2].tolist() == [1.5, 5.5]


def test_smoothing_leaves_a_straight_line_as_it_is() -> None:
    line = Curve.of([(step, 2.0 * step) for step in range(200)])
    assert np.allclose(line.smoothed(share=0.05).values, line.values, atol=1e-9)


def test_smoothing_leaves_an_exponential_fall_as_it_is() -> None:
    fall = Curve.of([(step, math.exp(-step / 20)) for step in range(200)])
    assert np.allclose(fall.smoothed(share=0.05).values, fall.values, rtol=1e-9)


def test_smoothing_passes_over_gaps() -> None:
    assert Curve.of([(0, -1.0), (1, math.nan), (2, 3.0)]).smoothed().values.tolist() == [-1.0, 1.0, 3.0]
    assert Curve.of([(0, math.nan), (1, math.nan)]).smoothed().values.tolist() == pytest.approx(
        [math.nan, math.nan], nan_ok=True
    )


def test_a_row_without_a_value_is_a_gap() -> None:
    read = read_curves([json.dumps({"step": 3, "lr": 0.1, "train/loss": None}), "", '{"torn'])
    assert list(read) == ["train/loss"]
    assert np.isnan(read["train/loss"].values).tolist() == [True]


def test_every_metric_gets_a_plot_of_its_own(tmp_path: Path) -> None:
    read = {
        "train/loss": Curve.of([(step, 2.0 / (step + 1)) for step in range(100)]),
        "val/loss": Curve.of([(50, 0.3), (99, 0.2)]),
        "val/accuracy": Curve.of([(50, 0.9)]),
        "test/accuracy": Curve.of([(99, 0.9)]),
    }
    written = draw_metrics(tmp_path, title="digits", curves=read, modes={"val/accuracy": "max"})
    assert [path.name for path in written] == ["accuracy.png", "loss.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.png", "loss.png"]
    assert all(map(is_png, written))


def test_figures_of_a_strategy_are_no_metric(tmp_path: Path) -> None:
    read = read_curves(['{"step": 1, "train/loss": 2.0, "pipeline/bubble": 0.2}'])

    assert [path.name for path in draw_metrics(tmp_path, title="digits", curves=read, modes={})] == ["loss.png"]


@pytest.mark.parametrize("values", [[math.nan], [0.0], [-1.0, 2.0], []])
def test_odd_values_are_drawn_too(tmp_path: Path, values: list[float]) -> None:
    points = list(enumerate(values))
    draw_metrics(tmp_path, title="t", curves={"val/loss": Curve.of(points)}, modes={})
    draw_lr(tmp_path / "lr.png", title="t", rates={"": points})
    assert is_png(tmp_path / "loss.png")
    assert is_png(tmp_path / "lr.png")
