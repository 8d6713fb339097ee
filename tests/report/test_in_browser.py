"""A script of a page that shows another value than the files, runs a hostile name, or keeps the wrong jobs is caught
here alone: Chromium without a network, driven by playwright. Skipped where either is absent.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import needs_axe, needs_browser, opened, serious_findings, tab
from trainkit.config.schema import MonitoredMetric
from trainkit.report.curves import LoggedRows
from trainkit.report.schemas.looking import ChangedKey, ComparedSide, PairedComparison
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.ledger_document import ledger_page
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.record import write_page, write_run_page

HOSTILE = "</script><img src=x onerror=window.hit=1>\u202e" + "x" * 10_000
SETTING = {"key": "optimizer.lr", "value": 0.05, "recipe": 0.001, "set_by": "command line", "tag": "maths"}
COMPARED = PairedComparison(
    version=1, time="2026-11-28T19:00:00+00:00", metric="val/loss", mode="min", answer="better", difference=-0.0044,
    interval=[-0.0082, -0.0006], alpha=0.05, more_pairs=0, pairs=[], gain_of_pairing=2.7, unpaired=[], remarks=["one"],
    seconds=90.0, line="better  val/loss -0.0044 [-0.0082, -0.0006], 95 % at any look, 5 pairs",
    a=ComparedSide(name="optimizer.lr=0.1", folder="a", state="", diverged=0),
    b=ComparedSide(name=HOSTILE, folder="b", state="", diverged=0),
    differences=[ChangedKey(key="optimizer.lr", left=0.1, right=HOSTILE, tag="maths")],
)  # fmt: skip
pytestmark = needs_browser


def rows_of(rate: float, name: str = "train/loss") -> list[dict[str, Any]]:
    """The rows of a training of 30 steps whose loss falls."""
    logged = range(5, 31, 5)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "samples": step * 64,
            "seconds": step / 7,
            name: 2.3 / (1 + rate * step),
            "lr": rate / step,
            "memory": 3.6e8,
        }
        for step in logged
    ]
    return [*rows, *({"step": step, "val/loss": 2.4 / (1 + rate * step)} for step in (15, 30))]


def run_page_at(folder: Path, rows: list[dict[str, Any]], name: str = "all steps done") -> Path:
    """The page of a run in whose files a name stands."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"status": "failed", "reason": name, "steps": 30, "metrics": {name: 1.5}}
    (folder / "result.json").write_text(json.dumps(result))
    setting = {**SETTING, "value": name}
    (folder / "settings.json").write_text(json.dumps({"settings": [setting], "continued_at": [20]}))
    write_run_page(RunFolder(folder), folder / "report.html")
    return folder / "report.html"


def comparison_at(path: Path, settings: list[dict[str, str]], *, is_sweep: bool, name: str = "") -> Path:
    """The page of runs with these settings, the last of which was pruned."""
    runs = []
    for index, values in enumerate(settings):
        rows = LoggedRows()
        for row in rows_of(0.01 * (1 + index), f"train/loss{name}"):
            rows.add(json.dumps(row).encode())
        is_last = index == len(settings) - 1
        command = f"{name}trainkit {' '.join(f'{key}={value}' for key, value in values.items())}"
        runs.append(
            ComparedRun(
                name=f"{name}{index}", folder=name, status="pruned" if is_last else "finished", is_faded=is_last,
                metrics={"val/loss": 1.0 - 0.1 * index}, command=command, settings=values, rows=rows,
            )
        )  # fmt: skip
    keys = [DifferingKey(key=key, tag="maths", values=[values[key] for values in settings]) for key in settings[0]]
    goal = MonitoredMetric(metric="val/loss", mode="min")
    page = Comparison(title=name or "runs", goal=goal, runs=runs, differences=keys, is_sweep=is_sweep, notes=[name])
    write_page(path, comparison_page(page))
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of a run, a comparison and a sweep of six jobs, one of them pruned."""
    folder = tmp_path_factory.mktemp("pages")
    jobs = [{"seed": seed, "optimizer.lr": rate} for seed in "01" for rate in ("0.001", "0.01", "0.1")]
    run_page_at(folder, rows_of(0.05)).rename(folder / "run.html")
    comparison_at(folder / "sweep.html", jobs, is_sweep=True)
    comparison_at(folder / "comparison.html", jobs[:2], is_sweep=False)
    same = PairedComparison(**{**COMPARED, "answer": "the same", "difference": None})
    write_page(folder / "ledger.html", ledger_page([COMPARED, same], "outputs/comparisons.jsonl"))
    return folder


ALL = pytest.mark.parametrize("name", ["run.html", "comparison.html", "sweep.html", "ledger.html"])
FOREIGN = "[...document.querySelectorAll('[src], [href]')].filter((one) => !/^data:/.test(one.src ?? one.href)).length"


@ALL
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_a_page_opens_without_an_error_and_fits_its_screen_and_one_page_of_a4(
    browser: Any, pages: Path, name: str, width: int, scheme: str
) -> None:
    page = opened(browser, pages / name, width=width, scheme=scheme)
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(FOREIGN) == 0
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == (scheme == "dark")
    assert len(re.findall(rb"/Type /Page\b(?!s)", page.pdf(prefer_css_page_size=True))) == 1
    page.context.close()


def test_the_cursor_shows_the_values_of_metrics_jsonl_on_all_charts(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "run.html")
    chart = page.locator(".chart").filter(has_text="train/loss")
    chart.locator(".plot canvas").wait_for()
    chart.locator(".plot").press("Home")
    for row in rows_of(0.05)[:4]:
        shown = chart.locator("li", has_text="train/loss").locator(".at").inner_text()
        value, step = re.fullmatch(r"(\S+) at step (\d+)", shown).groups()  # type: ignore[union-attr]
        assert int(step) == row["step"]
        assert float(value) == pytest.approx(row["train/loss"], rel=1e-3)
        assert page.locator("li", has_text="lr").locator(".at").first.inner_text().endswith(f"at step {step}")
        chart.locator(".plot").press("ArrowRight")
    assert page.locator("tr", has_text="343.3 MiB").count() == 1  # one value in all rows: no chart
    page.context.close()


def test_curves_show_every_step_and_value_of_metrics_jsonl(browser: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "samples": step, "even": step * 0.123456} for step in range(1, 2_000)]
    rows += [{"step": step, "samples": step, "uneven": 0.1, "none": None} for step in (2_001, 2_005, 2_006)]
    page = opened(browser, run_page_at(tmp_path, rows))
    curves = {name: (steps, values) for name, steps, values in page.evaluate(
        "data.curves.map((one) => [one.name, steps(one), one.y])"
    )}  # fmt: skip
    steps = [*range(1, 2_000)]
    assert curves["even"] == (steps, pytest.approx([step * 0.123456 for step in steps], rel=1e-6))
    assert curves["uneven"] == ([2_001, 2_005, 2_006], [0.1] * 3)
    assert curves["none"] == ([2_001, 2_005, 2_006], [None] * 3)
    page.context.close()


def test_brushing_two_axes_leaves_the_jobs_inside_both(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "sweep.html")
    rows = page.locator("tbody tr[data-jobs]")
    page.get_by_label("optimizer.lr from").select_option("0.01")
    page.get_by_label("seed to").select_option("0")
    assert sorted(row.get_attribute("data-jobs") for row in rows.all()) == ["1", "2"]
    assert page.get_by_text("2 of 6 jobs").count() == 1
    page.context.close()


def test_the_leaderboard_folds_seeds_fades_pruned_jobs_and_shows_the_command(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "sweep.html")
    rows = page.locator("tbody tr[data-jobs]")
    folded = {row.get_attribute("data-jobs"): row for row in rows.all()}
    assert set(folded) == {"0 3", "1 4", "2", "5"}
    assert "± " in folded["0 3"].inner_text()
    assert (rows.last.get_attribute("class"), rows.last.get_attribute("data-jobs")) == ("faded", "5")
    folded["2"].locator("input").check()
    assert "optimizer.lr=0.1" in page.locator(".command code").inner_text()
    page.get_by_role("button", name="optimizer.lr").click()
    order = [row.locator("code").first.inner_text() for row in rows.all()]
    assert order == sorted(order, key=float)
    page.context.close()


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_hostile_name_is_text(browser: Any, tmp_path: Path, kind: str) -> None:
    if kind == "run":
        path = run_page_at(tmp_path, rows_of(0.05, f"train/loss{HOSTILE}"), HOSTILE)
    else:
        keys = [HOSTILE, *(f"{number}{HOSTILE}" for number in range(12))]
        settings = [dict.fromkeys(keys, f"{index}{HOSTILE}") for index in range(2)]
        path = comparison_at(tmp_path / "page.html", settings, is_sweep=True, name=HOSTILE)
    page = opened(browser, path, width=360)
    if kind == "sweep":
        page.locator("input[name=chosen]").first.check()
        assert page.locator(".command code").inner_text().startswith(HOSTILE[:30])
        without = page.get_by_text("Without one: ").inner_text()
        assert [f"{number}{HOSTILE[:30]}" in without for number in (9, 10, 11)] == [False, True, True]
    assert page.errors == []
    assert page.evaluate("window.hit === undefined && document.images.length === 0")
    assert page.evaluate(FOREIGN) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.context.close()


@needs_axe
@ALL
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding(browser: Any, pages: Path, name: str, scheme: str) -> None:
    page = tab(browser, scheme=scheme, bypass_csp=True)
    page.goto((pages / name).as_uri())
    page.locator("td, footer").first.wait_for()
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 900})
        assert serious_findings(page) == []
    page.context.close()
