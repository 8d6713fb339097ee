"""Five screens kept as pictures: the pages look as they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import needs_browser, opened
from tests.support.pictures import TOLERANCE, difference, difference_from_kept, shrunk
from trainkit.config.schema import MonitoredMetric
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.curves import LoggedRows
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_page, write_run_page

pytestmark = needs_browser
KEPT = Path(__file__).parent / "screens"
RESULT = {"status": "finished", "reason": "all steps done", "steps": 200, "seconds": 3.0, "seconds_total": 4.0}


def lines(rate: float) -> list[str]:
    """The rows of a training whose loss falls."""
    rows = [
        {"step": step, "samples": step * 64, "seconds": step / 50, "train/loss": 2.3 / (1 + rate * step), "lr": rate}
        for step in range(5, 201, 5)
    ]
    rows += [{"step": step, "val/loss": 2.4 / (1 + rate * step)} for step in (50, 100, 150, 200)]
    return [json.dumps(row) + "\n" for row in rows]


def run_at(folder: Path) -> Path:
    """The page of a run of fixed files."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines(0.05)))
    (folder / "result.json").write_text(json.dumps({**RESULT, "metrics": {"val/loss": 0.2181}}))
    setting = {"key": "optimizer.lr", "value": 0.05, "recipe": 0.001, "set_by": "command line", "tag": "maths"}
    (folder / "settings.json").write_text(json.dumps({"settings": [setting], "continued_at": [100]}))
    (folder / "environment.json").write_text(json.dumps({"argv": ["trainkit", "recipe=digits", "optimizer.lr=0.05"]}))
    write_run_page(RunFolder(folder), folder / "report.html")
    return folder / "report.html"


def comparison_at(path: Path, *, number: int, is_sweep: bool) -> Path:
    """A page of runs of fixed rows."""
    runs = []
    for place in range(number):
        rows, rate = LoggedRows(), 0.01 * (1 + place)
        for line in lines(rate):
            rows.add(line.encode())
        run = ComparedRun(
            name=str(place), folder=str(place), status="pruned" if place == 4 else "finished", is_faded=place == 4,
            metrics={"val/loss": 2.4 / (1 + rate * 200)}, steps=200, seconds=4.0, command="trainkit recipe=digits",
            settings={"optimizer.lr": str(rate), "seed": str(place % 2)}, rows=rows,
        )  # fmt: skip
        runs.append(run)
    keys = [
        DifferingKey(key=key, tag="maths", values=[run.settings[key] for run in runs])
        for key in ("optimizer.lr", "seed")
    ]
    goal = MonitoredMetric(metric="val/loss", mode="min")
    page = Comparison(title="rates", goal=goal, runs=runs, differences=keys, is_sweep=is_sweep)
    write_page(path, comparison_page(page))
    return path


def screen(page: Any, font: str = "DejaVu Sans") -> bytes:
    """A picture of a page whose charts are drawn, without its last line (time, folder), in a font of Debian's."""
    page.add_style_tag(
        content=f"footer {{ visibility: hidden }} body {{ font-family: '{font}', sans-serif !important }}"
    )
    page.wait_for_timeout(300)  # uPlot draws in the next frame
    picture: bytes = page.screenshot()
    page.context.close()
    return picture


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_of_a_run_looks_as_it_did(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page = opened(browser, run_at(tmp_path / "digits"), width=width, height=1500, scheme=scheme, bypass_csp=True)
    assert difference_from_kept(KEPT / f"run_{width}_{scheme}.png", screen(page)) <= TOLERANCE


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_of_a_sweep_looks_as_it_did(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = comparison_at(tmp_path / "report.html", number=6, is_sweep=True)
    page = opened(browser, path, width=width, height=1500, scheme=scheme, bypass_csp=True)
    assert difference_from_kept(KEPT / f"sweep_{width}_{scheme}.png", screen(page)) <= TOLERANCE


def test_a_comparison_looks_as_it_did(browser: Any, tmp_path: Path) -> None:
    path = comparison_at(tmp_path / "comparison.html", number=2, is_sweep=False)
    page = opened(browser, path, height=1500, bypass_csp=True)
    assert difference_from_kept(KEPT / "comparison_1280_light.png", screen(page)) <= TOLERANCE


BROKEN = {
    "no charts": ".plot canvas { display: none }",
    "other colours": ":root { --ground: #000 !important; --ink: #fff !important }",
    "no trust strip": ".strip { display: none !important }",
    "one column": ".charts { grid-template-columns: 1fr !important }",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_page_that_is_broken_differs(browser: Any, tmp_path: Path, name: str) -> None:
    page = opened(browser, run_at(tmp_path / "digits"), height=1500, bypass_csp=True)
    page.add_style_tag(content=BROKEN[name])
    assert difference_from_kept(KEPT / "run_1280_light.png", screen(page)) > TOLERANCE


def test_another_font_makes_no_difference(browser: Any, tmp_path: Path) -> None:
    shots = []
    for font in ("DejaVu Sans", "DejaVu Serif"):
        page = opened(browser, run_at(tmp_path / "digits"), height=1500, bypass_csp=True)
        shots.append(shrunk(screen(page, font=font)))
    assert difference(*shots) <= TOLERANCE
