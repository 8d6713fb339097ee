"""A page of the docs that the site leaves out, and an address that leads nowhere, are caught here alone."""

from __future__ import annotations

import importlib
import importlib.util
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
    wanted = sorted({*pages, "docs/decisions/README.md"})
    assert sorted(path for path in menu if path.startswith(("docs/", "recipes/"))) == wanted


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
    found = re.findall(r"\]\(([^)]*)\)", (site / "llms.txt").read_text())
    assert "docs/errors.html" in found
    assert [path for path in found if not (site / path).is_file()] == []


@pytest.mark.long
def test_every_address_of_a_page_leads_somewhere_and_none_loads_what_is_elsewhere(site: Path) -> None:
    pages = {path: Addresses(path) for path in site.rglob("*.html")}
    found = [(path, address) for path, page in pages.items() for address in page.loaded]
    found += [(path, address) for path, page in pages.items() for address in page.links if ":" not in address]
    wrong = []
    for path, address in found:
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
        given = {name: value for name, value in attrs if value}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        addresses = [given[name] for name in ("src", "href", "data", "poster", "action") if name in given]
        found = self.links if tag == "a" else self.loaded
        found += [address for address in addresses if not address.startswith("data:")]
