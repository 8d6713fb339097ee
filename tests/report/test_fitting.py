"""Pages keep within their bytes, whatever is large, and name what they leave out; packed numbers keep 7 digits."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.test_run_page import numbers, shown
from trainkit.config.schema import MonitoredMetric
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.curves import Curve, LoggedRows
from trainkit.report.web.packing import column, compact_curve
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_page, write_run_page

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(47_000)
HOSTILE = '<&"\\\U0001f600'
"""Each character takes 2 to 6 bytes on a page."""


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


def test_pictures_go_before_a_page_has_more_than_300_kb_and_before_curves_are_coarse(tmp_path: Path) -> None:
    rows_of(tmp_path, ["train/loss"], 1_000)
    pictures_in(tmp_path)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    assert 200_000 < (tmp_path / "report.html").stat().st_size <= 300_000
    content = shown(tmp_path / "report.html")
    assert content["left_out"] == "Left out, since this page has at most 300 KB: the picture of the worst samples."
    assert [one["picture"] is None for one in content["figures"]["samples"]] == [False] * 3
    assert len(numbers(content["curves"][0]["y"])) == 1_000


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


@pytest.mark.slow
def test_the_sum_of_everything_large_fits_into_300_kb(tmp_path: Path) -> None:
    everything_in(tmp_path)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 300_000
    content = shown(tmp_path / "report.html")
    assert content["left_out"] == (
        "Left out, since this page has at most 300 KB: the picture of the worst samples; plots/worst_c.png; "
        "plots/worst_b.png; plots/worst_a.png; texts after 20 characters; rows after the first 6 of config, "
        "environment, result.json, notes, ranks, worst samples, restart marks, rollback marks; "
        "confusion matrices and layers."
    )
    assert len(content["curves"]) == 200
    assert content["commands"][0]["command"] == f"trainkit '{'<' * 600}'"
    assert content["settings"][0]["value"] == f'"{"<" * 19}... (602 characters)'


def compared(number: int, *, command: str, text: str) -> Iterator[ComparedRun]:
    """Runs with curves, a command and differing values of this length."""
    draw = random.Random(0)
    for place in range(number):
        rows = LoggedRows()
        for name in ("val/loss", "train/loss"):
            curve, clock = rows.curves.setdefault(name, Curve()), rows.clock.setdefault("seconds", Curve())
            for step in range(50):
                curve.add(step, draw.random())
                clock.add(step, step / 7)
        values = {f"a.key_{key}": f"{place}{text}" for key in range(60)}
        yield ComparedRun(
            name=f"{place}{text}", folder=text, status="finished", command=command, seconds=1.0, steps=9, rows=rows,
            metrics={"val/loss": (place * 7919) % 10_007 / 7}, settings=values,
        )  # fmt: skip


def comparison_of(runs: list[ComparedRun], *, is_sweep: bool, num_keys: int) -> Comparison:
    keys = [
        DifferingKey(key=key, tag="maths", values=[run.settings[key] for run in runs])
        for key in [*runs[0].settings][:num_keys]
    ]
    goal = MonitoredMetric(metric="val/loss", mode="min")
    return Comparison(title="t", goal=goal, runs=runs, differences=keys, is_sweep=is_sweep)


@pytest.mark.parametrize(
    ("number", "command", "text", "num_keys", "is_sweep", "left"),
    [
        (200, "c" * 2_000, "x", 2, True, ""),
        (200, '"' * 2_000, "x" * 400, 2, True, "texts after 60 characters; the commands of all but the 20 best"),
        (250, HOSTILE * 99, HOSTILE * 80, 60, False, "of 250 runs all but the 200 best by val/loss"),
    ],
)
@pytest.mark.slow
def test_a_comparison_of_any_size_fits_into_a_megabyte(
    tmp_path: Path, number: int, command: str, text: str, num_keys: int, is_sweep: bool, left: str
) -> None:
    runs = [*compared(number, command=command, text=text)]
    write_page(tmp_path / "page.html", comparison_page(comparison_of(runs, is_sweep=is_sweep, num_keys=num_keys)))
    assert (tmp_path / "page.html").stat().st_size <= 1_000_000
    content = shown(tmp_path / "page.html")
    assert left in content["left_out"]
    assert bool(left) == bool(content["left_out"])
    best = max(content["runs"], key=lambda run: -run["value"])
    assert best["command"].startswith(command[:2_000])
    assert best["value"] == 0
    assert str(number) in content["sentence"].replace(",", "")


@pytest.mark.slow
def test_a_run_of_16_curves_shows_2000_points_of_each_to_six_digits(tmp_path: Path) -> None:
    names = [f"train/m{number}" for number in range(16)]
    rows_of(tmp_path, names, 2_000)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 300_000
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    curves = {one["name"]: numbers(one["y"]) for one in shown(tmp_path / "report.html")["curves"]}
    for name in names:
        assert curves[name] == pytest.approx([row[name] for row in logged], rel=1e-6)


def test_a_small_page_has_numbers_that_a_person_can_read(tmp_path: Path) -> None:
    rows_of(tmp_path, ["a"], 3)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    assert isinstance(shown(tmp_path / "report.html")["curves"][0]["y"], list)


@pytest.mark.parametrize(
    "values",
    [
        [0.1234567, None, -2.5e-30, 1.7e38, 3_493_724.0, 0.0, -0.0],
        [1e300, 1e-300, 5e-45, None, 3.4e38, 0.3333333],
        [7.25] * 900,
        [],
    ],
)
def test_packed_numbers_keep_six_digits(values: list[float | None]) -> None:
    found = numbers(column(values, is_packed=True))
    assert [value is None for value in found] == [value is None for value in values]
    assert [value or 0.0 for value in found] == pytest.approx([value or 0.0 for value in values], rel=6e-7, abs=0)


def test_the_shortest_form_of_a_column_is_taken() -> None:
    draw = random.Random(0)
    points = [(step, draw.random()) for step in (*range(0, 500, 5), *range(501, 900, 3))]
    found = compact_curve(points, len(points), is_packed=True)
    assert found["dx"] == {"r": [0, 1, 5, 99, 6, 1, 3, 132]}
    assert len(found["y"]) == 4 * math.ceil(4 * len(points) / 3)
    assert column([0.5, 0.25], is_packed=True) == [0.5, 0.25]
