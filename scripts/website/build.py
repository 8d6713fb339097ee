"""Build the docs site: python scripts/website/build.py FOLDER.

The Markdown of the repository, the reference that `reference.py` makes of the code, and `llms.txt`, as pages that open
from a disk without a network, with a search. It needs the extra `site`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(HERE)]

import messages  # type: ignore[import-not-found]
import reference  # type: ignore[import-not-found]

_PAGES: Final = (
    "README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md",
    "recipes/*/README.md", "benchmarks/results/**/*.md",
)  # fmt: skip
_SHIM: Final = "https://unpkg.com/iframe-worker/shim"
"""Where a page of the generator loads iframe-worker from (MIT; the file and its licence lie beside this script)."""
_HOME: Final = re.compile(r'href="[./]+"(?= title="[^"]*" class="[^"]*md-logo")')
_LINK: Final = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def build(out: Path) -> None:
    """Build the site.

    Raises:
        FileExistsError: the folder exists.
        subprocess.CalledProcessError: a link leads nowhere, a page is in no menu, or mkdocs is not installed.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists. Name a folder that does not: the site is all that it will hold.")
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        _lay_out(source)
        errors = source / "docs/errors.md"
        _write(errors, messages.with_messages(errors.read_text(), messages.messages(ROOT / "trainkit")))
        for name, text in reference.pages().items():
            _write(source / "reference" / name, text)
        _write(source / "llms.txt", _llms(source))
        for name in ("extra.css", "extra.js"):
            shutil.copy(HERE / name, source)
        site = generate(source)
        _let_open_from_a_disk(site)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(site, out)


def generate(source: Path) -> Path:
    """Make the pages of a folder of Markdown; return their folder, beside it.

    Raises:
        subprocess.CalledProcessError: as `build`.
    """
    config = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    config |= {"docs_dir": source.name, "site_dir": "site"}
    python = config["plugins"][2]["mkdocstrings"]["handlers"]["python"]
    python |= {"paths": [str(ROOT)], "options": {**python["options"], "extensions": [str(HERE / "examples.py")]}}
    config_file = source.parent / "mkdocs.yml"
    config_file.write_text(yaml.safe_dump(config, sort_keys=False))
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--config-file", config_file], check=True)
    return source.parent / "site"


def _let_open_from_a_disk(site: Path) -> None:
    """Let pages load the script of the search from the site instead of the network, and the logo lead to a page.

    The page for addresses that do not exist is removed: it supposes a site at the root of a host.
    """
    (site / "404.html").unlink()
    shutil.copytree(HERE / "iframe-worker", site / "assets/iframe-worker")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = page.read_text().replace(_SHIM, f"{up}assets/iframe-worker/shim.js")
        page.write_text(_HOME.sub(f'href="{up}index.html"', text))


def _lay_out(source: Path) -> None:
    """Copy the pages and every file that one of them links to, in the folders of the repository."""
    pages = sorted({page for pattern in _PAGES for page in ROOT.glob(pattern)})
    for page in pages:
        text = _LINK.sub(partial(_linked, page), page.read_text())
        _write(source / page.relative_to(ROOT), f"{_head(page.relative_to(ROOT))}{text}")
    for page in pages:
        for target in _LINK.findall(page.read_text()):
            path = (page.parent / target[0]).resolve()
            if path.is_file() and path.suffix != ".md":
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    folder = ROOT / "benchmarks/results"
    results = [page for page in pages if page.is_relative_to(folder)]
    rows = [f"- [{_title(page.read_text())}]({page.relative_to(folder)})" for page in results]
    _write(source / "benchmarks/results/README.md", "\n".join(["# Measured", "", *rows]))


def _head(page: Path) -> str:
    """Return the head of a page: the search leaves out records of the past, which would come before the docs."""
    is_record = "decisions" in page.parts or page.parts[0] in ("benchmarks", "CHANGELOG.md")
    return "---\nsearch:\n  exclude: true\n---\n\n" if is_record else ""


def _linked(page: Path, link: re.Match[str]) -> str:
    """Return a link of the site: a folder is its README."""
    target, anchor = link[1], link[2] or ""
    if (page.parent / target).is_dir():
        target = f"{target.rstrip('/')}/README.md"
    return f"]({target}{anchor})"


def _llms(source: Path) -> str:
    """Return the list of the pages for language models (llmstxt.org): one line a page, by the site's menu."""
    config = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for door in config["nav"]:
        ((name, entries),) = door.items()
        lines += ["", f"## {name}", ""]
        for path in _paths(entries):
            text = (source / path).read_text()
            page = path.replace("README.md", "index.md").removesuffix(".md")
            lines.append(f"- [{_title(text)}]({page}.html): {_first_sentence(text)}")
    return "\n".join([*lines, ""])


def _paths(entries: Sequence[Any]) -> Iterator[str]:
    for entry in entries:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        if isinstance(value, str):
            yield value
        else:
            yield from _paths(value)


def _title(text: str) -> str:
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def _first_sentence(text: str) -> str:
    """Return the first sentence of a page, without marks and links."""
    paragraphs = re.sub(r"^```.*?^```$", "", text.partition("\n")[2], flags=re.DOTALL | re.MULTILINE).split("\n\n")
    paragraph = next((text for text in map(str.rstrip, paragraphs) if re.match(r"\n*[A-Za-z`*\[]", text)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "").strip()
    return re.split(r"(?<=[.:])(?<!et al\.)\s", re.sub(r"\s+", " ", plain))[0].rstrip(".:") + "."


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/website/build.py FOLDER")
    try:
        build(Path(sys.argv[1]))
    except FileExistsError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
