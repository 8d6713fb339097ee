"""Pages of long runs and of many runs: a bound on points and on runs, said on the page."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.report.test_run_page import content_of, shown
from trainkit.config.schema import MonitoredMetric
from trainkit.report.web.comparison_document import ComparedRun, Comparison, comparison_page
from trainkit.report.web.curves import LoggedRows, column
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_run_page

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(47_000)


def rows_of(folder: Path, names: list[str], number: int) -> None:
    """Write a metrics.jsonl of values that compress badly."""
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, number + 1):
            values = {name: draw.random() for name in names}
            file.write(json.dumps({"step": step, "samples": step, "seconds": step / 7, **values}) + "\n")


def pictures_in(folder: Path, cell: str = "7") -> None:
    """Put the largest pictures into a run folder: three of a callback, one of an evaluation."""
    place = folder / "evaluations/best-val"
    for made in (place, folder / "plots"):
        made.mkdir(parents=True)
    for path in (place / "worst.png", *(folder / f"plots/worst_{split}.png" for split in ("a", "b", "c"))):
        path.write_bytes(PICTURE)
    table = {"columns": [cell] * 12, "rows": [[cell] * 12] * 32}
    content = {"split": "val", "checkpoint": "best", "tables": {"val/worst": table}}
    (place / "evaluation.json").write_text(json.dumps(content))


def everything_in(folder: Path) -> None:
    """Fill a run folder with everything that a page shows, each as large as it may be."""
    long = "<" * 600  # six bytes each
    pictures_in(folder, long)
    rows_of(folder, [f"{long[:280]}{number}" for number in range(210)], 60)
    setting = {"value": long, "recipe": long, "set_by": long, "tag": "maths"}
    settings = [{"key": f"{number}{long}", **setting} for number in range(300)]
    (folder / "settings.json").write_text(json.dumps({"settings": settings, "continued_at": [*range(900)]}))
    environment = {"argv": ["trainkit", long], "notes": [long] * 50, **{f"{key}{long}": long for key in range(99)}}
    (folder / "environment.json").write_text(json.dumps(environment))
    restart = {"kind": "all", "cause": long, "step": 3, "checkpoint": 2}
    result = {
        "status": "failed",
        "reason": long,
        "resume": long,
        "seconds": 8.0,
        "restarts": [restart] * 900,
        "rollbacks": [{"step": 3, "checkpoint": 2}] * 900,
    }
    (folder / "result.json").write_text(json.dumps(result))
    matrix = {"columns": ["class", *[long] * 24], "rows": [[long, *[123_456] * 24]] * 24}
    tables = [json.dumps({"name": f"{split}{long}/confusion", "step": 1, **matrix}) for split in "abc"]
    (folder / "tables.jsonl").write_text("\n".join(tables))
    layer = {"quantiles": [0.123456] * 5, "largest": 1.5, "rms": 1.25, "zero_share": 0.5, "nonfinite": 3}
    layers = {f"{number}{long}": layer for number in range(70)}
    record = {"step": 1, "weights": layers, "gradients": layers, "activations": layers}
    (folder / "histograms.jsonl").write_text(json.dumps(record))
    (folder / "live").mkdir()
    for rank in range(600):
        (folder / f"live/rank_{rank}").write_text("")


def test_a_page_shows_everything_large_whole(tmp_path: Path) -> None:
    everything_in(tmp_path)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    content = shown(tmp_path / "report.html")
    assert len(content["curves"]) == 200
    assert content["commands"][0]["command"] == f"trainkit '{'<' * 600}'"
    assert content["settings"][0]["value"] == f'"{"<" * 399}... (602 characters)'
    assert None not in [one["picture"] for one in (content["worst"], *content["figures"]["samples"])]
    assert len(content["figures"]["confusion"]) == 3


def test_a_sweep_shows_the_best_1000_runs_and_the_curves_of_the_best_200() -> None:
    runs = []
    for place in range(1_200):
        rows = LoggedRows()
        for step in range(30):
            rows.add(json.dumps({"step": step, "val/loss": step / 7}).encode())
        loss = float((place * 7919) % 1_200)
        runs.append(
            ComparedRun(name=f"{place}", folder="f", status="finished", metrics={"val/loss": loss}, rows=rows),
        )
    goal = MonitoredMetric(metric="val/loss", mode="min")
    page = comparison_page(Comparison(title="t", goal=goal, runs=runs, differences=[], is_sweep=True))
    content = content_of(page)
    assert sorted(run["value"] for run in content["runs"]) == [float(value) for value in range(1_000)]
    (curve,) = content["curves"]
    assert sorted(content["runs"][one["run"]]["value"] for one in curve["runs"]) == [*range(200)]
    assert content["notes"] == [
        "Of 1,200 runs, only the 1,000 best by val/loss are shown.",
        "Of 1,200 runs, the curves of the 200 best by val/loss are shown.",
    ]


def test_a_curve_of_a_comparison_has_at_most_500_points() -> None:
    rows = LoggedRows()
    for step in range(5_000):
        rows.add(json.dumps({"step": step, "samples": step, "seconds": step / 4, "train/loss": step % 7}).encode())
    runs = [ComparedRun(name=name, folder=name, status="finished", metrics={}, rows=rows) for name in "ab"]
    goal = MonitoredMetric(metric="val/loss", mode="min")
    page = comparison_page(Comparison(title="t", goal=goal, runs=runs, differences=[]))
    curve = content_of(page)["curves"][0]["runs"][1]
    assert curve["seen"] == 5_000
    assert 250 < len(curve["y"]) == len(curve["seconds"]) == len(curve["samples"]) <= 500


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.12345678, None, -2.5e-30, 3_493_724.0, 0.0], [0.1234568, None, -2.5e-30, 3_493_724, 0]),
        ([1e300, 5e-324], [1e300, 5e-324]),
        ([], []),
    ],
)
def test_numbers_of_a_page_have_7_digits(values: list[float | None], expected: list[float | None]) -> None:
    assert column(values) == expected
