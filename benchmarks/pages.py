"""Measure the pages of a run of a million points and of a sweep of 200 runs: size, writing, opening in Chromium.

    python benchmarks/pages.py [--rounds 9]

The run has 250,000 rows of four metrics, the sweep 200 jobs of 2,000 rows of two. Reading is the first pass over
metrics.jsonl, which a run makes once, beside its steps; writing is one page from what was read. A page is open when
its last part stands there and its first chart (of a sweep, its leaderboard) is drawn, from the start of the navigation,
without a network.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from trainkit.config.schema import MonitoredMetric
from trainkit.report.curves import MetricsReader
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.record import write_page, write_run_page

NAMES = ("train/loss", "val/loss", "lr", "grad_norm")


def write_rows(path: Path, number: int, names: tuple[str, ...]) -> None:
    """Write a metrics.jsonl; its values do not repeat, and compress badly."""
    with path.open("w") as file:
        for step in range(1, number + 1):
            values = {name: (step * 7919 + index) % 10_007 / 9_973 for index, name in enumerate(names)}
            file.write(json.dumps({"step": step, "samples": step * 64, "seconds": step / 9, **values}) + "\n")


def sweep_page(folder: Path, *, runs: int = 200, rows: int = 2_000) -> str:
    """Return the page of jobs that have the same rows."""
    write_rows(folder / "metrics.jsonl", rows, ("val/loss", "train/loss"))
    curves = MetricsReader(folder / "metrics.jsonl").read()
    jobs = [
        ComparedRun(
            name=str(number),
            folder=f"outputs/sweeps/rates/{number}",
            status="finished",
            command=f"trainkit recipe=digits optimizer.lr={number / 1000} seed={number % 5}",
            metrics={"val/loss": number / 7},
            settings={"optimizer.lr": str(number // 5 / 1000), "seed": str(number % 5)},
            rows=curves,
        )
        for number in range(runs)
    ]
    keys = [DifferingKey(key=key, tag="maths", values=[]) for key in ("optimizer.lr", "seed")]
    goal = MonitoredMetric(metric="val/loss", mode="min")
    return comparison_page(Comparison(title="rates", goal=goal, runs=jobs, differences=keys, is_sweep=True))


def timed(act: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(rounds):
        before = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def opening(browser: Any, path: Path, rounds: int) -> str:
    """Return the seconds, median and largest, from the start of a navigation until the first chart is drawn."""
    seconds = []
    for _ in range(rounds):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        page = context.new_page()
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector("footer", state="attached")
        page.wait_for_selector(".plot canvas, tr[data-jobs]", state="attached")
        seconds.append(page.evaluate("performance.now()") / 1e3)
        context.close()
    return f"{statistics.median(seconds):.2f} (most {max(seconds):.2f})"


def main() -> None:
    """Measure, print and write the table."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as started:
        folder, reader = Path(temporary), MetricsReader(Path(temporary, "metrics.jsonl"))
        write_rows(folder / "metrics.jsonl", 250_000, NAMES)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reading = timed(reader.read, 1)
        run, sweep = folder / "report.html", folder / "sweep.html"
        writing = timed(lambda: write_run_page(RunFolder(folder), run, rows=reader.read()), rounds)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        together = timed(lambda: write_page(sweep, sweep_page(folder)), 1)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        opened = [opening(browser, path, rounds) for path in (run, sweep)]
        version = browser.version
        browser.close()
        sizes = [f"{path.stat().st_size / 1e3:.0f}" for path in (run, sweep)]
    cells = [
        ["a run of 1,000,000 points", f"{reading:.1f}", f"{writing:.3f}"],
        ["200 runs of 2,000 rows", "", f"{together:.1f}"],
    ]
    rows = [[*cell, size, seconds] for cell, size, seconds in zip(cells, sizes, opened, strict=True)]
    head = ["page", "reading once, s", "writing, s", "KB", "opening, s (target: below 3)"]
    body = (
        f"{report.table(head, rows)}\n\nChromium {version}. Reading and writing the first took {memory / 1024:.0f} MiB "
        "more memory; the second is written with the rows of one job, read once."
    )
    report.write("pages", "Pages of runs and sweeps", f"python benchmarks/pages.py --rounds {rounds}", body)


if __name__ == "__main__":
    main()
