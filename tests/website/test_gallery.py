"""A card of the gallery whose figures are not those of its runs is caught here alone."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import ROOT

SITE = ROOT / "scripts/website"


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    yield importlib.import_module("gallery")
    del sys.modules["gallery"]


def run_folder(folder: Path, seed: int, **changed: Any) -> Path:
    """A run of the recipe digits, as far as a card reads it."""
    folder.mkdir()
    values = {"status": "finished", "cores": 2, "lr": 0.1, "cwd": "/home/me", **changed}
    result = {"status": values["status"], "seconds": 3.25, "steps": 690, "weights_sha256": f"{seed:064x}"}
    result["metrics"] = {"val/accuracy": 0.98 + seed / 1000}
    environment = {
        "started": "2026-11-24T10:00:00+00:00", "cwd": values["cwd"], "host": "mine", "pid": 7, "python": "3.11.7",
        "packages": {"trainkit": "0.1.0", "torch": "2.13.0+cpu"}, "devices": {"cores": values["cores"], "gpus": 0},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "resolved.yaml").write_text(json.dumps({"recipe": "digits", "seed": seed, "lr": values["lr"]}))
    page = f'{{"folder":"{folder.resolve()}","environment":[["cwd","/home/me"],["host","mine"],["pid","7"]]}}'
    (folder / "report.html").write_text(page)
    return folder


def test_three_seeds_make_a_card_that_is_read_back(gallery: Any, tmp_path: Path) -> None:
    card = gallery.card_of([run_folder(tmp_path / str(seed), seed) for seed in (2, 0, 1)])
    card.write(tmp_path / "digits.json")
    assert gallery.Card.read(tmp_path / "digits.json") == card
    assert "**0.981 ± 0.001**, mean and standard deviation of 3 seeds: 0.98 (`seed=0`)" in gallery.page([card])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"status": "preempted"}, "the run is preempted, not finished"),
        ({"lr": 0.2}, "has another config than"),
        ({"cores": 64}, "has another machine than"),
        ({"seed": 0}, "2 seeds are too few for a spread"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    gallery: Any, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folders = [run_folder(tmp_path / str(seed), seed) for seed in (0, 1)]
    folders.append(run_folder(tmp_path / "2", **{"seed": 2, **changed}))
    with pytest.raises(gallery.RefusedError, match=message):
        gallery.card_of(folders)


def test_a_report_shows_nothing_of_the_machine_that_made_it(gallery: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 0)
    expected = '{"folder":"outputs/digits-0","environment":[["cwd",""],["host",""],["pid",""]]}'
    assert gallery.clean_report(folder, "digits-0") == expected


def test_the_page_is_made_of_the_records_and_each_report_is_of_their_weights(gallery: Any) -> None:
    folder = ROOT / "docs/gallery"
    assert (ROOT / "docs/gallery.md").read_text() == gallery.page(gallery.records(folder))
    for record in folder.glob("*.json"):
        values = json.loads(record.read_text())
        assert values["runs"][0]["weights_sha256"] in record.with_suffix(".html").read_text()
        assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
