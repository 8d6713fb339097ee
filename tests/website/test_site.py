"""A page of the docs that the site leaves out, and an address that leads nowhere, are caught here alone.

A card of the gallery whose figures are not those of its runs is caught here alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from tests.packaging.conftest import ROOT
from trainkit.verbs.support.table import VERBS

pytestmark = pytest.mark.timeout(900)  # building takes a minute alone, and more beside other tests

SITE = ROOT / "scripts/website"


def paths(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        (value,) = entry.values()
        yield from [value] if isinstance(value, str) else paths(value)


def test_every_page_of_the_docs_is_in_the_menu_once() -> None:
    menu = list(paths(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"]))
    pages = {
        path.relative_to(ROOT).as_posix() for name in ("docs/*.md", "recipes/*/README.md") for path in ROOT.glob(name)
    }
    expected = sorted({*pages, "docs/decisions/README.md"})
    assert sorted(path for path in menu if path.startswith(("docs/", "recipes/"))) == expected


@pytest.mark.slow
def test_the_reference_lists_every_choice_and_every_name_that_the_docs_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    reference = importlib.import_module("reference")
    choices = {f"{file.parent.name}={file.stem}" for file in (ROOT / "conf").glob("*/*.yaml")}
    assert choices == {*re.findall(r"^### (\S+)$", reference._choices(), re.MULTILINE)}
    listed = {*re.findall(r"^::: (\S+)$", reference._api(), re.MULTILINE)}
    assert {f"trainkit.api.{name}" for name in ("compose", "generate", "load", "session", "train")} <= listed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("zensical", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra site)")
    folder = tmp_path_factory.mktemp("site") / "pages"
    command = [sys.executable, str(SITE / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_the_reference_names_every_verb_and_the_list_for_language_models_every_page(site: Path) -> None:
    verbs = (site / "reference/verbs.html").read_text()
    assert [verb for verb in VERBS if f'id="{verb}"' not in verbs] == []
    assert 'id="batch.micro_size"' in (site / "reference/keys.html").read_text()
    assert 'id="trainkit.api.train"' in (site / "reference/api.html").read_text()
    links = re.findall(r"\]\(([^)]*)\)", (site / "llms.txt").read_text())
    assert "docs/errors.html" in links
    assert [path for path in links if not (site / path).is_file()] == []


@pytest.mark.long
def test_every_address_of_a_page_leads_somewhere_and_none_loads_what_is_elsewhere(site: Path) -> None:
    pages = {path: Addresses(path) for path in site.rglob("*.html")}
    addresses = [(path, address) for path, page in pages.items() for address in page.loaded]
    addresses += [(path, address) for path, page in pages.items() for address in page.links if ":" not in address]
    wrong = []
    for path, address in addresses:
        file, _, anchor = unquote(address).partition("#")
        target = Path(os.path.normpath(path.parent / file)) if file else path
        if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
            wrong.append(f"{path.relative_to(site)}: {address}")
    assert wrong == []
    assert [
        file for file in site.rglob("*.css") if re.search(r"(url\(|@import)\s*[\"']?(https?:|//)", file.read_text())
    ] == []


class Addresses(HTMLParser):
    """The addresses of a page: addresses that a browser loads by itself, except data addresses, and links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        addresses = [values[name] for name in ("src", "href", "data", "poster", "action") if name in values]
        links = self.links if tag == "a" else self.loaded
        links += [address for address in addresses if not address.startswith("data:")]


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
        assert json.loads(record.read_text())["runs"][0]["weights_sha256"] in record.with_suffix(".html").read_text()
        assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
