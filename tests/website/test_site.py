"""The docs site: what it holds, and that it works in a browser without a network."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.conftest import ROOT
from trainkit.config.schema import GROUPS, RunConfig, hints_of
from trainkit.config.values import plain
from trainkit.verbs.support.call import VERBS

pytestmark = pytest.mark.timeout(900)  # building takes a minute alone, and more beside other tests
SITE = ROOT / "scripts/website"
BROWSER = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
QUESTIONS = {
    "learning rate warmup": "docs/numbers.html",
    "exit code": "docs/errors.html",
    "out of memory": "docs/errors.html",
    "bf16 precision": "reference/choices.html",
    "batch.micro_size": "reference/keys.html",
    "export onnx": "reference/verbs.html",
    "int8": "docs/quantize.html",
    "optuna": "docs/search.html",
    "stale gradients": "docs/parameter-server.html",
    "TF_CONFIG": "docs/clusters.html",
    "pipeline stages": "docs/pipeline.html",
    "weighted sampler": "docs/data.html",
    "secrets": "docs/secrets.html",
    "TPU": "docs/tpu.html",
    "which strategy": "docs/which-strategy.html",
    "gradient compression": "docs/reduce.html",
    "ray": "docs/engines.html",
    "elastic": "docs/elastic.html",
    "k folds": "reference/keys.html",
    "jupyter": "docs/in-a-notebook.html",
}
LINKS = """() => {
  const found = [];
  const walk = (root) => root.querySelectorAll('*').forEach((node) => {
    if (node.matches('a[href]') && root !== document) found.push(node.href);
    if (node.shadowRoot) walk(node.shadowRoot);
  });
  walk(document);
  return found;
}"""


def paths(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        (value,) = entry.values()
        yield from [value] if isinstance(value, str) else paths(value)


def test_every_page_of_the_docs_is_in_the_menu_once() -> None:
    menu = list(paths(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"]))
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    recipes = [str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*/README.md")]
    assert sorted(path for path in menu if path.startswith(("docs/", "recipes/"))) == sorted(
        [*pages, *recipes, "docs/decisions/README.md"]
    )


@pytest.mark.long
def test_the_page_of_errors_lists_the_messages_of_the_code_below_their_sections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    messages = importlib.import_module("messages")
    found = messages.messages(ROOT / "trainkit")
    assert sum(map(len, found.values())) > 500
    assert "--cfg: must be job, hydra or all." in found["command-line"]
    page = messages.with_messages((ROOT / "docs/errors.md").read_text(), found)
    assert page.count("<details>") == len(found)
    assert "<script>" not in messages.listing(["</li><script>"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("zensical", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra site)")
    folder = tmp_path_factory.mktemp("site") / "pages"
    command = [sys.executable, str(SITE / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_the_reference_names_every_verb_and_every_key(site: Path) -> None:
    verbs, keys = ((site / f"reference/{name}.html").read_text() for name in ("verbs", "keys"))
    assert [verb for verb in VERBS if f'id="{verb}"' not in verbs] == []
    assert [key for key in _keys(RunConfig) if f'id="{key}"' not in keys] == []


def _keys(kind: type, above: str = "") -> Iterator[str]:
    """The keys that every training has, by the classes of the config."""
    for name, hint in hints_of(kind).items():
        section = plain(hint)
        if isinstance(section, type) and is_dataclass(section):
            yield from _keys(section, f"{name}.")
        elif name not in GROUPS:
            yield f"{above}{name}"


@pytest.mark.long
def test_the_list_for_language_models_leads_to_pages(site: Path) -> None:
    found = re.findall(r"\]\(([^)]*)\)", (site / "llms.txt").read_text())
    assert len(found) > 70
    assert [path for path in found if not (site / path).is_file()] == []


@pytest.mark.long
def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    command = [sys.executable, str(SITE / "build.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (1, ["mine.txt"])


@pytest.mark.long
def test_the_search_finds_each_page_first_without_a_network(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    if not BROWSER.exists():
        pytest.skip("Chromium is not installed: apt-get install chromium")
    said: list[str] = []
    wrong = {}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(BROWSER), args=FLAGS)
        page = browser.new_context(offline=True).new_page()
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        for question, answer in QUESTIONS.items():
            first = _first_answer(page, question)
            if first.partition("#")[0] != answer:
                wrong[question] = first
        browser.close()
    assert (wrong, said) == ({}, [])


def _first_answer(page: Any, question: str) -> str:
    """Search as a reader does, until the answers are to the whole question."""
    page.keyboard.press("Control+a")
    page.keyboard.type(question)
    for _ in range(300):
        page.wait_for_timeout(200)
        found = page.evaluate(LINKS)
        if found and f"?h={question.replace(' ', '+')}" in found[0]:
            page.wait_for_timeout(200)
            address = str(page.evaluate(LINKS)[0])
            return re.sub(r"\?h=[^#]*", "", address.partition("/pages/")[2])
    return "no answer"
