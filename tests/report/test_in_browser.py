"""The pages in a real browser: Chromium without a network, driven by playwright. Skipped where either is absent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.browsing import needs_browser, opened
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_run_page

AXE = os.environ.get("TRAINKIT_TEST_AXE", "")
SMALL = (
    "recipe=null",
    "steps=30",
    "callbacks=[]",
    "logger=[]",
    "quiet=true",
    "log_every_steps=5",
    "eval.every_epochs=1",
)
HOSTILE = ("</script><script>window.hit=1</script>", "<img src=x onerror=window.hit=1>", "\u202egnorw", "x" * 10_000)
needs_axe = pytest.mark.skipif(not AXE, reason="set TRAINKIT_TEST_AXE to the axe.min.js of the npm package axe-core")
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


ALL = pytest.mark.parametrize("name", ["0/report.html", "comparison.html", "report.html"])


@ALL
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_a_page_opens_without_an_error_and_fits_its_screen(
    browser: Any, pages: Path, name: str, width: int, scheme: str
) -> None:
    page = opened(browser, pages / name, width=width, scheme=scheme)
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == (scheme == "dark")
    page.context.close()


def test_every_number_of_the_result_stands_on_the_page(browser: Any, pages: Path) -> None:
    page = opened(browser, pages / "0/report.html")
    text = page.evaluate("document.body.innerText")
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", (pages / "0/result.json").read_text())
    assert len(numbers) > 20
    assert [number for number in numbers if number not in text] == []
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
    box = page.locator('rect[data-axis="optimizer.lr"]').bounding_box()
    page.mouse.move(box["x"] + 8, box["y"] + 1)
    page.mouse.down()
    page.mouse.move(box["x"] + 8, box["y"] + box["height"] * 0.25, steps=3)
    page.mouse.up()
    rows = page.locator("tbody tr[data-jobs]").all()
    assert sorted(" ".join(row.get_attribute("data-jobs") for row in rows).split()) == ["2", "5"]
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
    page.get_by_role("button", name="optimizer.lr").click()
    order = [row.locator("code").first.inner_text() for row in rows.all()]
    assert order == sorted(order, key=float)
    page.context.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text(browser: Any, pages: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for kept in ("resolved.yaml", "environment.json"):
        (folder / kept).write_bytes((pages / "0" / kept).read_bytes())
    (folder / "result.json").write_text(json.dumps({"status": "failed", "reason": name, "metrics": {name: 1.5}}))
    rows = [{"step": step, "samples": step, "seconds": step, name: 0.5 * step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "settings.json").write_text(
        json.dumps({"settings": [{"key": name, "value": name, "recipe": None, "set_by": name, "tag": name}]})
    )
    assert main(["report", str(folder)]) == 0
    page = opened(browser, folder / "report.html", width=360)
    assert page.errors == []
    assert page.evaluate("window.hit === undefined && document.images.length === 0")
    assert name[:60] in page.locator(".chart .legend .text").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.context.close()


@needs_axe
@ALL
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding(browser: Any, pages: Path, name: str, scheme: str) -> None:
    page = opened(browser, pages / name, scheme=scheme, bypass_csp=True)
    page.evaluate(Path(AXE).read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
    page.context.close()
