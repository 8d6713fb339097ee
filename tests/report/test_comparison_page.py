"""The page that compares runs, or the jobs of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainkit
from tests.report.test_run_page import SHORT, shown
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.config.schema import MonitoredMetric
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.curves import Curve, LoggedRows
from trainkit.sweeps.results.comparing import compare_runs, spread_of_run
from trainkit.sweeps.results.leaderboard import collect
from trainkit.sweeps.results.page import page_at_end

PRICED = ("hardware=laptop", "hardware.price_usd_h=3.6")
GOAL = MonitoredMetric(metric="val/loss", mode="min")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of a sweep, of a device with a price: two seeds, and another rate."""
    folder = tmp_path_factory.mktemp("compared")
    jobs = []
    for name, seed, rate in (("a", 0, 0.01), ("b", 1, 0.01), ("c", 0, 0.02)):
        arguments = latest(*SHORT, *PRICED, "steps=12", "log_every_steps=4", f"seed={seed}", f"optimizer.lr={rate}")
        trainkit.train(arguments, run_dir=folder / name)
        jobs.append({"job": name, "folder": name, "overrides": arguments, "exit_code": 0})
    (folder / "sweep.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    return folder


def test_a_comparison_shows_differing_keys_alone_with_their_tags(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs / "a"), str(runs / "b")]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    content = shown(tmp_path / "comparison.html")
    assert content["sentence"] == "a and b differ in 1 key that can change the result."
    assert content["differences"] == [{"key": "seed", "tag": "maths", "values": ["0", "1"]}]
    assert [run["name"] for run in content["runs"]] == ["a", "b"]


def test_differing_keys_stand_in_the_order_of_what_they_can_change() -> None:
    keys = [DifferingKey(key=tag, tag=tag, values=["1", "2"]) for tag in ("cosmetic", "speed", "maths", "placement")]
    runs = [ComparedRun(name=name, folder="", status="finished", metrics={}, rows=LoggedRows()) for name in "ab"]
    page = comparison_page(Comparison(title="t", goal=GOAL, runs=runs, differences=keys))
    assert [page.index(f'"key":"{tag}"') for tag in ("maths", "placement", "speed", "cosmetic")] == sorted(
        page.index(f'"key":"{tag}"') for tag in ("cosmetic", "speed", "maths", "placement")
    )


def test_each_point_has_its_samples_and_seconds(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "a"), str(runs / "c"), "--out", str(tmp_path / "page.html")]) == 0
    rows = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    (loss,) = (one for one in shown(tmp_path / "page.html")["curves"] if one["name"] == "train/loss")
    logged = [row for row in rows if "train/loss" in row]
    assert loss["runs"][0]["samples"] == [row["samples"] for row in logged]
    assert loss["runs"][0]["seconds"] == pytest.approx([row["seconds"] for row in logged], rel=1e-5)


def test_a_run_has_a_cost_where_it_has_a_price_and_a_plan_says_its_devices(runs: Path) -> None:
    for name, hours, device_hours in (("a", 2.0, 4.0), ("b", 1e-300, 1e300)):
        plan = {"time": {"total_h": hours}, "cost": {"device_h": device_hours}}
        (runs / name / "plan.json").write_text(json.dumps(plan))
    found = compare_runs([runs / name for name in "abc"]).runs
    assert [run.usd_s for run in found] == [0.002, None, None]  # 3.6 dollars an hour, of two devices
    resolved = runs / "a/resolved.yaml"
    before = resolved.read_text()
    resolved.write_text(before.replace("price_usd_h: 3.6", "price_usd_h: null"))
    assert compare_runs([runs / "a", runs / "b"]).runs[0].usd_s is None
    resolved.write_text(before)


def test_the_command_of_a_run_repeats_it(runs: Path) -> None:
    path = runs / "a/environment.json"
    content = json.loads(path.read_text())
    for argv, command in ((["/bin/trainkit", "seed=0"], "trainkit seed=0"), (["/bin/trainkit", "resume", "a"], "")):
        path.write_text(json.dumps({**content, "argv": argv}))
        assert compare_runs([runs / "a", runs / "b"]).runs[0].command == command


def test_a_sweep_has_a_page_with_its_swept_keys_and_the_command_of_each_job(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs)]) == 0
    assert capsys.readouterr().out == f"{runs}/report.html\n"
    content = shown(runs / "report.html")
    assert (content["kind"], content["columns"]) == ("sweep", ["seed", "optimizer.lr"])
    assert content["runs"][2]["settings"] == {"seed": "0", "optimizer.lr": "0.02"}
    assert "optimizer.lr=0.02" in content["runs"][2]["command"]


def test_a_run_of_a_sweep_shows_the_spread_over_its_seeds(runs: Path) -> None:
    spread = spread_of_run(runs / "a")
    losses = [json.loads((runs / name / "result.json").read_text())["metrics"]["val/loss"] for name in "ab"]
    assert spread is not None
    assert spread.num_seeds == 2
    assert spread.mean == pytest.approx(sum(losses) / 2)
    assert spread_of_run(runs / "c") is None
    assert main(["report", str(runs / "a")]) == 0
    assert shown(runs / "a/report.html")["best"]["spread"].endswith("over 2 seeds")


def test_the_end_of_a_sweep_writes_the_spread_into_the_pages_of_its_jobs(runs: Path) -> None:
    pages = {name: runs / name / "report.html" for name in "abc"}
    pages["b"].unlink()
    before = pages["c"].read_bytes()
    assert page_at_end(runs, collect(runs)) == runs / "report.html"
    content = shown(pages["a"])
    assert content["best"]["spread"].endswith("over 2 seeds")
    assert content["curves"][0]["name"] == "val/loss"
    assert not pages["b"].exists()
    assert pages["c"].read_bytes() == before


def test_two_hundred_runs_have_their_curves() -> None:
    compared = []
    for number in range(200):
        rows = LoggedRows()
        for name in ("val/loss", "train/loss", "lr"):
            curve, clock = rows.curves.setdefault(name, Curve()), rows.clock.setdefault("seconds", Curve())
            for step in range(60):
                curve.add(step * 10, (step * 7919 + number) % 997 / 991)
                clock.add(step * 10, step / 7)
        settings = {"optimizer.lr": str(number / 1000), "seed": str(number % 5)}
        compared.append(
            ComparedRun(
                name=str(number),
                folder=f"outputs/sweeps/s/{number}",
                status="finished",
                command="trainkit " * 20,
                metrics={"val/loss": number / 7},
                settings=settings,
                rows=rows,
            )
        )
    keys = [DifferingKey(key=key, tag="maths", values=[]) for key in ("optimizer.lr", "seed")]
    page = comparison_page(Comparison(title="s", goal=GOAL, runs=compared, differences=keys, is_sweep=True))
    assert page.count('"run":') == 400


@pytest.mark.parametrize("name", ["</script><b>", "\u202ex", "y" * 10_000])
def test_hostile_names_of_jobs_are_text(runs: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "job").symlink_to(runs / "a")
    job = {"job": name, "folder": "job", "overrides": [f"name={name}"], "exit_code": 0}
    (folder / "sweep.json").write_text(json.dumps({"jobs": [job, {**job, "job": "2", "overrides": ["name=b"]}]}))
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().count("</script>") == 2
    assert shown(folder / "report.html")["runs"][0]["name"].startswith(name[:200])


def test_report_refuses_folders_of_which_one_is_no_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs / "a"), str(tmp_path)]) == 2
    assert "Give run folders, or one folder of a sweep." in capsys.readouterr().err
    assert main(["report", str(runs / "a"), "--out", str(tmp_path / "none/page.html")]) == 2
    assert "must be a file in an existing folder." in capsys.readouterr().err
