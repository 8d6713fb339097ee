"""The pages in a real browser: Chromium without a network, driven by playwright. Skipped where either is absent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.report.test_large_pages import everything_in, rows_of
from tests.report.test_run_page import leaves
from tests.support.browsing import needs_axe, needs_browser, opened, serious_findings, tab
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.config.schema import MonitoredMetric
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.curves import LoggedRows
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_page, write_run_page

SMALL = (
    "recipe=null",
    "steps=30",
    "callbacks=[]",
    "logger=[]",
    "quiet=true",
    "log_every_steps=5",
    "eval.every_epochs=1",
    "hardware=laptop",
    "hardware.price_usd_h=0.36",
)
HOSTILE = ("</script><script>window.hit=1</script>", "<img src=x onerror=window.hit=1>", "\u202egnorw", "x" * 10_000)
pytestmark = needs_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of a run, a comparison and a sweep of six jobs, one of them pruned."""
    folder = tmp_path_factory.mktemp("pages")
    jobs = []
    for number, (seed, rate) in enumerate((seed, rate) for seed in (0, 1) for rate in (0.001, 0.01, 0.1)):
        arguments = latest(*SMALL, f"seed={seed}", f"optimizer.lr={rate}")
        trainkit.train(arguments, run_dir=folder / str(number))
        jobs.append({"job": str(number), "folder": str(number), "overrides": arguments, "exit_code": 0})
    jobs[5]["pruned"] = True
    (folder / "sweep.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder / "0"), str(folder / "1"), "--out", str(folder / "comparison.html")]) == 0
    return folder


PAGES = ("0/report.html", "comparison.html", "report.html")
ALL = pytest.mark.parametrize("name", PAGES)
FOREIGN = "[...document.querySelectorAll('[src], [href]')].filter((one) => !/^data:/.test(one.src ?? one.href)).length"


@ALL
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_a_page_opens_without_an_error_and_fits_its_screen(
    browser: Any, pages: Path, name: str, width: int, scheme: str
) -> None:
    page = opened(browser, pages / name, width=width, scheme=scheme)
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(FOREIGN) == 0
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == (scheme == "dark")
    page.context.close()


def test_every_value_of_the_result_stands_on_the_page(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "0/report.html")
    rows = page.locator("section", has_text="Every value of result.json").locator("tbody tr")
    found = {row.locator("th").inner_text(): json.loads(row.locator("td").text_content()) for row in rows.all()}
    assert found == dict(leaves(json.loads((pages / "0/result.json").read_text())))
    page.context.close()


def test_the_cursor_shows_the_values_of_metrics_jsonl(browser: Any, pages: Path) -> None:
    rows = [json.loads(line) for line in (pages / "0/metrics.jsonl").read_text().splitlines()]
    page = opened(browser, pages / "0/report.html")
    chart = page.locator(".chart").filter(has_text="train/loss")
    chart.locator(".plot canvas").wait_for()
    chart.locator(".plot").press("Home")
    for _ in range(4):
        shown = chart.locator("li", has_text="train/loss").locator(".at").inner_text()
        value, step = re.fullmatch(r"(\S+) at step (\d+)", shown).groups()  # type: ignore[union-attr]
        (logged,) = (row["train/loss"] for row in rows if row["step"] == int(step) and "train/loss" in row)
        assert float(value) == pytest.approx(logged, rel=1e-6)
        chart.locator(".plot").press("ArrowRight")
    others = page.locator(".chart").filter(has_text="lr").first.locator(".at").first.inner_text()
    assert others.endswith(f"step {chart.locator('li', has_text='train/loss').locator('.at').inner_text().split()[-1]}")
    page.context.close()


def test_long_curves_show_the_values_of_metrics_jsonl(browser: Any, tmp_path: Path) -> None:
    names = [f"train/m{number}" for number in range(13)]
    rows_of(tmp_path, names, 2_000)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "samples": step, "rate": 0.1, "m": None}) + "\n" for step in (2_001, 2_005, 2_006)
        )
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    page = opened(browser, tmp_path / "report.html")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, steps, values in page.evaluate("data.curves.map((one) => [one.name, steps(one), one.y])"):
        logged = {row["step"]: row[name] for row in rows if name in row}
        assert steps == list(logged)
        assert values == ([None] * 3 if name == "m" else pytest.approx([*logged.values()], rel=1e-6))
    page.context.close()


def test_keys_zoom_and_move_a_chart(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "0/report.html")
    plot = page.locator(".chart").filter(has_text="train/loss").locator(".plot")
    plot.locator("canvas").wait_for()
    limits = "(({min, max}) => [min, max])(charts.find((one) => one.series[0].name.endsWith('loss')).plot.scales.x)"
    shown = []
    for key in ("Home", "+", "Shift+ArrowRight", "End", "-", "0", "Control++"):
        plot.press(key)
        shown.append(page.evaluate(limits))
    assert shown == [[5, 30], [5, 17.5], [8.125, 20.625], [17.5, 30], [5, 30], [5, 30], [5, 30]]
    for _ in range(9):
        plot.press("+")
    low, high = page.evaluate(limits)
    assert sum(low <= step <= high for step in range(5, 31, 5)) == 2
    page.context.close()


def test_the_parts_of_a_page_stand_in_their_order(browser: Any, pages: Path, tmp_path: Path) -> None:
    page = opened(browser, pages / "0/report.html")
    parts = page.evaluate("[...document.querySelector('header').children].map((one) => one.className || one.tagName)")
    assert parts == ["H1", "verdict", "best", "command", "command", "strip"]
    page.context.close()
    everything_in(tmp_path)
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    page = opened(browser, tmp_path / "report.html", width=360)
    titles = [title.partition("<")[0] for title in page.locator("h2").all_inner_texts()]
    assert titles == [
        "Curves", "Plan against measured", "Where the time went", "Ranks", "Confusion matrix, c", "Confusion matrix, b",
        "Confusion matrix, a", "Highest losses, a", "Highest losses, b",
        "Highest losses, c", "Worst samples", "Layers", "Config", "Environment", "Notes", "Every value of result.json",
    ]  # fmt: skip
    assert page.locator(".key span").all_inner_texts() == ["restart", "rollback"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.errors == []
    page.context.close()


def test_curves_of_runs_with_a_price_stand_over_their_cost(browser: Any, pages: Path) -> None:
    rows = [json.loads(line) for line in (pages / "0/metrics.jsonl").read_text().splitlines()]
    page = opened(browser, pages / "comparison.html")
    page.get_by_role("button", name="US dollars").click()
    chart = page.locator(".chart").filter(has_text="train/loss")
    chart.locator(".plot canvas").wait_for()
    found = chart.locator(".at").first.inner_text()
    cost = float(found.partition(" at US dollar ")[2])
    assert cost == pytest.approx(max(row.get("seconds", 0.0) for row in rows) * 0.36 / 3600, rel=1e-5)
    page.context.close()


def test_the_pointer_moves_the_cursor_of_all_charts(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "0/report.html")
    over = page.locator(".chart").filter(has_text="train/loss").locator(".u-over")
    over.hover(position={"x": 3, "y": 40})
    assert "at step 5" in page.locator("li", has_text="train/loss").locator(".at").inner_text()
    assert page.locator("li", has_text="samples_per_s").locator(".at").inner_text().endswith("at step 5")
    page.context.close()


@ALL
def test_a_page_prints_to_one_page_of_a4(browser: Any, pages: Path, name: str) -> None:
    page = opened(browser, pages / name)
    content = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type /Page\b(?!s)", content)) == 1
    width, height = map(float, re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", content).groups())  # type: ignore[union-attr]
    assert (round(width), round(height)) == (595, 842)
    page.context.close()


def test_paper_shows_whole_parts_and_names_those_that_it_leaves_out(browser: Any, tmp_path: Path) -> None:
    settings = [
        {"key": f"a.key_{number}", "value": number, "recipe": None, "set_by": "command line", "tag": "maths"}
        for number in range(150)
    ]
    (tmp_path / "settings.json").write_text(json.dumps({"settings": settings}))
    command = ["trainkit", *(f"a.key_{number}={number}" for number in range(150))]
    (tmp_path / "environment.json").write_text(json.dumps({"argv": command}))
    rows = [{"step": step, "samples": step, **{f"a/m{name}": step / 7 for name in range(6)}} for step in range(1, 50)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_run_page(RunFolder(tmp_path), tmp_path / "report.html")
    page = opened(browser, tmp_path / "report.html", scheme="dark")
    whole = page.evaluate("page.innerHTML.length")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("page.getBoundingClientRect().height * 25.4 / 96") <= 270
    left_out = page.locator(".paper-note").inner_text()
    assert "long commands" in left_out
    assert "charts after the first 4" in left_out
    assert "rows of tables" in left_out
    assert page.locator("h2:visible").all_inner_texts()[-1] == "Config"
    assert page.evaluate("css('--ground')") == "#fff"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".paper-note, .off-paper").count() == 0
    assert page.evaluate("page.innerHTML.length") >= whole
    assert page.errors == []
    page.context.close()


def test_brushing_two_axes_leaves_the_jobs_inside_both(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "report.html")
    page.get_by_label("optimizer.lr from").select_option("0.01")
    page.get_by_label("seed to").select_option("0")
    kept = " ".join(row.get_attribute("data-jobs") for row in page.locator("tbody tr[data-jobs]").all()).split()
    assert sorted(kept) == ["1", "2"]
    assert page.get_by_text("2 of 6 jobs").count() == 1
    page.get_by_role("button", name="every job").click()
    for axis, jobs in (("optimizer.lr", ["2", "5"]), ("seed", ["5"])):  # the largest value of each
        box = page.locator(f'rect[data-axis="{axis}"]').bounding_box()
        page.mouse.move(box["x"] + 8, box["y"] + 1)
        page.mouse.down()
        page.mouse.move(box["x"] + 8, box["y"] + box["height"] * 0.25, steps=3)
        page.mouse.up()
        rows = page.locator("tbody tr[data-jobs]").all()
        assert sorted(" ".join(row.get_attribute("data-jobs") for row in rows).split()) == jobs
    page.context.close()


def test_the_leaderboard_folds_seeds_fades_pruned_jobs_and_shows_the_command(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "report.html")
    rows = page.locator("tbody tr[data-jobs]")
    folded = {row.get_attribute("data-jobs"): row for row in rows.all()}
    assert set(folded) == {"0 3", "1 4", "2", "5"}
    assert "± " in folded["0 3"].inner_text()
    assert rows.last.get_attribute("class") == "faded"
    assert rows.last.get_attribute("data-jobs") == "5"
    folded["2"].locator("input").check()
    assert "optimizer.lr=0.1" in page.locator(".command code").inner_text()
    assert page.locator(".command span").first.inner_text() == "repeat"
    page.get_by_role("button", name="optimizer.lr").click()
    order = [row.locator("code").first.inner_text() for row in rows.all()]
    assert order == sorted(order, key=float)
    page.context.close()


def hostile_page(folder: Path, name: str) -> Path:
    """The page of a run in whose files a name stands everywhere."""
    (folder / "result.json").write_text(json.dumps({"status": "failed", "reason": name, "metrics": {name: 1.5}}))
    rows = [{"step": step, "samples": step, "seconds": step, name: 0.5 * step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "settings.json").write_text(
        json.dumps({"settings": [{"key": name, "value": name, "recipe": None, "set_by": name, "tag": name}]})
    )
    write_run_page(RunFolder(folder), folder / "report.html")
    return folder / "report.html"


def hostile_comparison(path: Path, name: str, *, is_sweep: bool) -> Path:
    """A comparison of two runs with 13 keys, in which a name stands everywhere."""
    rows, keys = LoggedRows(), [name, *(f"{number}{name}" for number in range(12))]
    for step in (1, 2):
        rows.add(json.dumps({"step": step, "samples": step, "seconds": step, name: 0.5 * step}).encode())
    runs = [
        ComparedRun(
            name=f"{name}{place}", folder=name, status=name, command=name, metrics={name[:300]: place}, rows=rows,
            settings=dict.fromkeys(keys, f"{place}{name}"),
        )
        for place in range(2)
    ]  # fmt: skip
    differences = [DifferingKey(key=key, tag="maths", values=[f"0{name}", f"1{name}"]) for key in keys]
    goal = MonitoredMetric(metric=name[:300], mode="min")
    write_page(path, comparison_page(
        Comparison(title=name, goal=goal, runs=runs, differences=differences, is_sweep=is_sweep, notes=[name])
    ))  # fmt: skip
    return path


@pytest.mark.parametrize("kind", ["run", "comparison", "sweep"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text(browser: Any, tmp_path: Path, name: str, kind: str) -> None:
    is_run = kind == "run"
    path = hostile_page(tmp_path, name) if is_run else tmp_path / "page.html"
    if not is_run:
        hostile_comparison(path, name, is_sweep=kind == "sweep")
    page = opened(browser, path, width=360)
    if not is_run:
        page.locator("input[name=chosen]").first.check()
        assert page.locator(".command code").inner_text().startswith(name[:60])
        assert page.get_by_role("button", name="US dollars").count() == 0
    if kind == "sweep":
        without = page.get_by_text("Without one: ").inner_text()
        assert [f"{number}{name[:60]}" in without for number in (9, 10, 11)] == [False, True, True]
    assert page.errors == []
    assert page.evaluate("window.hit === undefined && document.images.length === 0")
    assert page.evaluate(FOREIGN) == 0
    assert name[:60] in page.locator(".chart .legend .text").first.inner_text()
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
