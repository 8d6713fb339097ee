"""The page of `trainkit watch --serve` in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.browsing import needs_browser, tab
from trainkit.watching.board import Board
from trainkit.watching.screen import lines_of
from trainkit.watching.server import serving

pytestmark = needs_browser
HOSTILE = "<img src=x onerror=window.hit=1>"


def made(root: Path, name: str, *, loss: float) -> Path:
    """A run that has ended, with a hostile name of a metric."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.yaml").touch()
    (folder / "result.json").write_text(json.dumps({"status": "finished", "steps": 7}))
    row = {"step": 7, "samples": 448, "seconds": 1.0, "train/loss": loss, f"x/{HOSTILE}": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_the_page_shows_what_the_terminal_shows_and_follows_it(browser: Any, tmp_path: Path) -> None:
    made(tmp_path, "digits/1", loss=0.5)
    board = Board(tmp_path, clock=iter(range(0, 10**6, 11)).__next__)  # each reading searches for new runs
    with serving(board.read, refresh_s=0.05) as server:
        page = tab(browser)
        page.goto(server.url)
        page.get_by_text("train/loss 0.5").wait_for()
        cells = page.locator("tbody tr").first.locator("td").all_inner_texts()
        assert [cells[0], cells[1], cells[2]] == ["digits/1", "finished", "7"]
        assert all(word in lines_of(board.read())[-1] for word in cells[:3])
        made(tmp_path, "digits/1", loss=0.25)
        made(tmp_path, "digits/2", loss=0.125)
        page.get_by_text("train/loss 0.25").wait_for()
        page.get_by_text("train/loss 0.125").wait_for()
        assert page.locator("#state").inner_text() == "2 runs."
        assert page.evaluate("window.hit === undefined && document.images.length === 0")
        assert page.locator("form, input, button, a").count() == 0
        assert page.errors == []
        page.context.close()


def test_without_the_token_the_browser_is_refused_and_a_page_of_another_origin_learns_nothing(
    browser: Any, tmp_path: Path
) -> None:
    made(tmp_path, "digits/1", loss=0.5)
    with serving(Board(tmp_path).read, refresh_s=0.05) as server:
        page = tab(browser)
        assert page.goto(server.url.partition("?")[0]).status == 403
        assert "digits" not in page.content()
        page.goto("about:blank")
        stolen = page.evaluate("(url) => fetch(url).then((got) => got.text(), () => 'refused')", server.url)
        assert stolen == "refused"
        page.context.close()


def test_the_page_says_when_its_server_has_ended(browser: Any, tmp_path: Path) -> None:
    made(tmp_path, "digits/1", loss=0.5)
    with serving(Board(tmp_path).read, refresh_s=0.05) as server:
        page = tab(browser)
        page.goto(server.url)
        page.get_by_text("train/loss 0.5").wait_for()
    page.get_by_text("No connection to trainkit watch.").wait_for()
    page.context.close()
