"""Chromium without a network, driven by playwright, for the tests of pages; they are skipped where either is absent."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AXE = os.environ.get("TRAINKIT_TEST_AXE", "")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell") or ""
needs_browser = [
    pytest.mark.long,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs playwright: pip install playwright"
    ),
]
needs_axe = pytest.mark.skipif(not AXE, reason="set TRAINKIT_TEST_AXE to the axe.min.js of the npm package axe-core")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the tests of a module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


def tab(browser: Any, *, width: int = 1280, height: int = 900, scheme: str = "light", **options: Any) -> Any:
    """Open an empty tab; its `errors` are those of the console."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    page = context.new_page()
    page.errors = []
    page.on("console", lambda entry: page.errors.append(entry.text) if entry.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    return page


def opened(browser: Any, path: Path, **options: Any) -> Any:
    """Open a page from the disk without a network."""
    page = tab(browser, offline=True, **options)
    page.goto(path.absolute().as_uri())
    page.wait_for_selector("footer")
    return page


def serious_findings(page: Any) -> list[tuple[str, str]]:
    """What axe finds on a page that keeps people out: rule and first element; the page was opened with bypass_csp."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Path(AXE).read_text())
    violations = page.evaluate("axe.run({preload: false})")["violations"]  # scripts read no style sheets of a disk
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in violations if rule["impact"] in ("serious", "critical")]
