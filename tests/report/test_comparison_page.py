"""A page that keeps the worst runs of a `max` metric, gives an evaluation the time of another row, or a run the
price or spread of another is caught here alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_run_page import content_of, shown
from trainkit.cli import main
from trainkit.config.schema import MonitoredMetric
from trainkit.report.curves import LoggedRows
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.sweeps.results.comparing import compare_runs, compare_sweep, page_at_end, spread_of_run
from trainkit.sweeps.results.leaderboard import collect


@pytest.fixture
def runs(run: Path, tmp_path: Path) -> Path:
    """Three jobs of a sweep, of a device with a price: two seeds, and another rate."""
    folder, jobs = tmp_path / "sweep", []
    for name, seed, rate, loss in (("a", 3, 0.02, 0.5), ("b", 1, 0.02, 0.7), ("c", 3, 0.04, 0.1)):
        job = shutil.copytree(run, folder / name)
        resolved = (job / "resolved.yaml").read_text().replace("seed: 3", f"seed: {seed}")
        (job / "resolved.yaml").write_text(resolved.replace("lr: 0.02", f"lr: {rate}"))
        (job / "result.json").write_text(json.dumps({"status": "finished", "metrics": {"val/loss": loss}}))
        overrides = ["steps=24", f"seed={seed}", f"optimizer.lr={rate}"]
        jobs.append({"job": name, "folder": name, "overrides": overrides, "exit_code": 0})
    (folder / "sweep.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    return folder


def page_of(runs: list[ComparedRun], *, mode: Any = "min", **options: Any) -> dict[str, Any]:
    """What the page of these runs shows."""
    goal = MonitoredMetric(metric="val/loss", mode=mode)
    return content_of(comparison_page(Comparison(title="t", goal=goal, runs=runs, **{"differences": [], **options})))


def run_of(name: str, *lines: str, **options: Any) -> ComparedRun:
    rows = LoggedRows()
    for line in lines:
        rows.add(line.encode())
    return ComparedRun(name=name, folder=name, status="finished", rows=rows, **{"metrics": {}, **options})


@pytest.mark.slow
def test_a_comparison_shows_differing_keys_alone_with_their_tags(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    content = shown(runs / "comparison.html")
    assert content["sentence"] == "a and b differ in 1 key that can change the result."
    assert content["differences"] == [{"key": "seed", "tag": "maths", "values": ["3", "1"]}]
    assert [run["name"] for run in content["runs"]] == ["a", "b"]


def test_differing_keys_stand_in_the_order_of_what_they_can_change() -> None:
    keys = [DifferingKey(key=tag, tag=tag, values=["1", "2"]) for tag in ("cosmetic", "speed", "maths", "placement")]
    content = page_of([run_of("a"), run_of("b")], differences=keys)
    assert [row["key"] for row in content["differences"]] == ["maths", "placement", "speed", "cosmetic"]


def test_an_evaluation_stands_between_the_rows_before_and_after_it() -> None:
    lines = [f'{{"step": {step}, "samples": {step * 8}, "seconds": {step / 10}, "a": 1}}' for step in (10, 20)]
    (curve,) = page_of([run_of("a", lines[0], '{"step": 15, "val/loss": 2}', lines[1])])["curves"][:1]
    assert (curve["name"], curve["runs"][0]["samples"], curve["runs"][0]["seconds"]) == ("val/loss", [120], [1.5])


def test_a_curve_of_a_comparison_has_at_most_500_points() -> None:
    lines = [f'{{"step": {step}, "samples": {step}, "seconds": {step}, "a": {step % 7}}}' for step in range(5_000)]
    curve = page_of([run_of("a"), run_of("b", *lines)])["curves"][0]["runs"][0]
    assert (curve["run"], curve["seen"]) == (1, 5_000)
    assert 250 < len(curve["y"]) == len(curve["seconds"]) == len(curve["samples"]) <= 500


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_sweep_shows_the_best_1000_runs_and_the_curves_of_the_best_200(mode: str) -> None:
    best_first = [rank if mode == "min" else 1_201 - rank for rank in range(1_202)]
    line, metrics = '{"step": 1, "val/loss": 1}', [{"val/loss": float(value)} for value in best_first]
    runs = [run_of(str(rank), line, metrics=metrics[rank], is_faded=rank == 0) for rank in range(1_202)]
    content = page_of(runs[::-1], mode=mode, is_sweep=True)
    assert sorted(int(run["name"]) for run in content["runs"]) == [*range(1, 1_001)]  # the failed one is the last
    drawn = [content["runs"][row["run"]] for row in content["curves"][0]["runs"]]
    assert sorted(int(run["name"]) for run in drawn) == [*range(1, 201)]
    assert [note.partition(", ")[2] for note in content["notes"]] == [
        "only the 1,000 best by val/loss are shown.",
        "the curves of the 200 best by val/loss are shown.",
    ]


def test_a_run_has_a_cost_where_it_has_a_price_and_a_plan_says_its_devices(runs: Path) -> None:
    for name, hours, device_hours in (("a", 2.0, 4.0), ("b", 1e-300, 1e300)):
        plan = {"time": {"total_h": hours}, "cost": {"device_h": device_hours}}
        (runs / name / "plan.json").write_text(json.dumps(plan))
    (runs / "c/plan.json").unlink(missing_ok=True)
    compared = compare_runs([runs / name for name in "abc"]).runs
    assert [run.usd_s for run in compared] == [0.002, None, None]  # 3.6 dollars an hour, of two devices
    resolved = runs / "a/resolved.yaml"
    resolved.write_text(resolved.read_text().replace("price_usd_h: 3.6", "price_usd_h: null"))
    assert compare_runs([runs / "a", runs / "b"]).runs[0].usd_s is None


def test_a_sweep_has_a_page_with_its_swept_keys_and_the_command_of_each_job(runs: Path) -> None:
    content = content_of(comparison_page(compare_sweep(runs, collect(runs))))
    assert (content["kind"], content["columns"]) == ("sweep", ["seed", "optimizer.lr"])  # not the steps: they are alike
    assert content["runs"][2]["settings"] == {"seed": "3", "optimizer.lr": "0.04"}
    assert "optimizer.lr=0.04" in content["runs"][2]["command"]
    assert [run["command"].endswith(" -m steps=24 optimizer.lr=0.02 seed=3,1") for run in content["runs"]] == [
        True, True, False,
    ]  # fmt: skip  # no lucky seed


def test_the_end_of_a_sweep_writes_the_spread_over_seeds_into_the_pages_of_its_jobs(runs: Path) -> None:
    spread = spread_of_run(runs / "a")
    assert spread is not None
    assert (spread.num_seeds, spread_of_run(runs / "c")) == (2, None)
    assert [spread.mean, spread.deviation] == pytest.approx([0.6, 0.02**0.5])
    (runs / "b/report.html").unlink()
    before = (runs / "c/report.html").read_bytes()
    assert page_at_end(runs, collect(runs)) == runs / "report.html"
    assert shown(runs / "a/report.html")["best"]["spread"] == "0.6 ± 0.14 over 2 seeds"
    assert not (runs / "b/report.html").exists()
    assert (runs / "c/report.html").read_bytes() == before


def test_report_refuses_folders_of_which_one_is_no_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (([str(tmp_path)], "Give run folders"), (["--out", "none/page.html"], "existing folder")):
        assert main(["report", str(runs / "a"), *arguments]) == 2
        assert message in capsys.readouterr().err
