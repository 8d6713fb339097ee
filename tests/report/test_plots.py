"""A smoothed curve that bends a straight line, an axis of the wrong kind, or a plot that a training waits for or that
outlives it is caught here alone.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainkit.cli import main
from trainkit.report.curves import Curve, draw_metrics, read_curves
from trainkit.report.drawing import Drawing
from trainkit.report.rate_curve import bars
from trainkit.report.sweep_plot import Axis, draw_sweep


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_is_averaged_and_keeps_its_mean() -> None:
    thin = Curve.of([(step, float(step % 2)) for step in range(6000)]).thinned()
    assert thin.values.tolist() == [0.5] * 1500
    assert thin.steps[:2].tolist() == [1.5, 5.5]


def test_smoothing_leaves_a_line_and_an_exponential_fall_as_they_are_and_passes_over_gaps() -> None:
    line = Curve.of([(step, 2.0 * step) for step in range(200)])
    assert np.allclose(line.smoothed(share=0.05).values, line.values, atol=1e-9)
    fall = Curve.of([(step, math.exp(-step / 20)) for step in range(200)])
    assert np.allclose(fall.smoothed(share=0.05).values, fall.values, rtol=1e-9)
    assert Curve.of([(0, -1.0), (1, math.nan), (2, 3.0)]).smoothed().values.tolist() == [-1.0, 1.0, 3.0]
    assert np.isnan(Curve.of([(0, math.nan)]).smoothed().values).all()


def test_a_row_without_a_value_is_a_gap() -> None:
    read = read_curves([json.dumps({"step": 3, "lr": 0.1, "train/loss": None}), "", '{"torn'])
    assert list(read) == ["train/loss"]
    assert np.isnan(read["train/loss"].values).tolist() == [True]


def test_every_metric_of_training_and_validation_gets_a_plot_of_its_own(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [{"step": step, "train/loss": 2.0 / (step + 1)} for step in range(100)]
    rows[50] |= {"val/loss": 0.3, "val/accuracy": 0.9}
    rows[99] |= {"val/loss": 0.2, "test/accuracy": 0.9, "pipeline/bubble": 0.2}
    lines = map(json.dumps, rows)
    written = draw_metrics(tmp_path, title="digits", lines=lines, modes={"val/accuracy": "max"})
    assert [path.name for path in written] == ["accuracy.png", "loss.png"]
    assert sorted(tmp_path.iterdir()) == written
    assert all(map(is_png, written))


def test_an_axis_is_what_its_values_are() -> None:
    kinds = {"1 2 9": "linear", "0.001 0.1": "log", "0 100": "linear", "1 auto": "names", "1 nan": "names"}
    assert {values: Axis.of("key", values.split()).kind for values in kinds} == kinds


def test_few_values_are_all_written_and_many_at_even_places() -> None:
    few, many = ["1", "2", "8"], [str(number) for number in range(101)]
    assert Axis.of("key", few).ticks(few) == [(0.0, "1"), (1 / 7, "2"), (1.0, "8")]
    assert [text for _, text in Axis.of("key", many).ticks(many)] == ["0", "25", "50", "75", "100"]


def job(value: float | None, status: str = "finished", **settings: str) -> dict[str, Any]:
    return {"label": "a job", "value": value, "status": status, "settings": settings}


def test_sweeps_of_one_job_of_failed_jobs_and_of_several_keys_are_drawn(tmp_path: Path) -> None:
    several = [job(0.9, lr="0.1", model="mlp"), job(0.8, "pruned", lr="0.01", model="gpt"), job(None, "failed", lr="1")]
    for number, jobs in enumerate(([job(0.5)], several, [job(None, "failed", lr=rate) for rate in ("0.1", "0.2")])):
        draw_sweep(tmp_path / f"{number}.png", title="sweep", metric="val/loss", mode="min", jobs=jobs)
        assert is_png(tmp_path / f"{number}.png")


def test_bars_are_heights_from_zero_to_the_largest() -> None:
    assert bars([0.0, 1.0, 3.0, 7.0], encoding="UTF-8") == "▁▂▄█"
    assert bars([0.0, 7.0], encoding="latin-1") == "_@"
    assert bars([0.0, 0.0], encoding=None) == "__"


def test_plan_shows_the_learning_rate_and_draws_it_as_png_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe=digits", "--rate-png", str(tmp_path / "rates.png")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  rate   ")]
    shown = line.split()[1]
    assert len(shown) == 60
    assert shown[0] == shown[-1] != shown[2]
    assert is_png(tmp_path / "rates.png")
    assert main(["plan", "recipe=digits", "--rate-png", "rates.pdf"]) == 2
    assert "--rate-png=rates.pdf: must end in .png" in capsys.readouterr().err


def test_a_plot_is_drawn_beside_the_training_and_says_why_it_fails(tmp_path: Path) -> None:
    rates = {"draw": "lr", "title": "digits", "rates": {"": [(0, 0.0), (10, 0.1)]}}
    absent = {"draw": "metrics", "folder": tmp_path, "title": "digits", "records": tmp_path / "absent.jsonl"}
    drawing = Drawing(absent, {**rates, "path": tmp_path / "plots/lr.png"})
    failure, drawn = drawing.wait(60)
    assert drawn == ""
    assert failure.startswith(f"trainkit.errors.AbsentFileError: {tmp_path}/absent.jsonl cannot be read")
    assert not drawing.running
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["lr.png"]


def test_a_plot_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    drawing = Drawing({"draw": "lr", "path": tmp_path / "lr.png", "title": "digits", "rates": {"": [(0, 0.0)]}})
    assert drawing.wait(0.001) == ["not drawn within 0.001 s"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_plot_does_not_outlive_its_run() -> None:
    # Started by another process than the one it was meant for: that one is gone, there is nothing to draw.
    command = [sys.executable, "-m", "trainkit.report.drawing", "1"]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
