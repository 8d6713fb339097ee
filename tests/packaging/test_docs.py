"""A command of the README or the docs that fails, or prints another error than the page shows, is caught here alone."""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import ROOT
from tests.packaging.shown_commands import commands, importing_from, problem_of, write_files
from tests.support import quick
from trainkit.verbs.support.call import parser_of
from trainkit.verbs.support.table import VERBS

PAGES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "skills/trainkit/SKILL.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(
    r"^<!-- (run(?:, long|, matrix)?|fails: \d+(?:, prints)?) -->\n```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMPOSED = re.compile(r"^<!-- (?:composes|run, \w+|command: \w+) -->\n```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
CARD = re.compile(r"^\| command \| `(.*)` \|$", re.MULTILINE)
MENTION = re.compile(r"^<!-- (?:run|fails|command|composes)", re.MULTILINE)
COMMAND = re.compile(r"(\$ |[A-Z_]+=\S+ )?(trainkit|python3?|pip|pytest|torchrun|ssh|export) ")
OF_PAGE = {"docs/adding-a-strategy.md": ("--config-dir", "my_conf", "--allow-package", "my_package")}
"""Arguments for what the reader of a page has put into trainkit itself."""


@dataclass(frozen=True)
class Block:
    page: str
    code: int
    commands: str
    answer: str | None
    prints: bool
    """Whether the answer is on stdout, of which lines in their order are shown."""


def blocks() -> Iterator[Any]:
    for page in PAGES:
        for kind, text, answer in BLOCK.findall((ROOT / page).read_text()):
            fails = re.match(r"fails: (\d+)", kind)
            code, prints = int(fails[1]) if fails else 0, "prints" in kind
            block = Block(page, code, text, answer if code else None, prints)
            lane = "long" if prints else kind.partition(", ")[2]
            marks = [getattr(pytest.mark, lane)] if lane in ("long", "matrix") else []
            yield pytest.param(block, id=f"{page}: {text.splitlines()[0][:40]}", marks=marks)


@pytest.mark.parametrize("block", [*blocks()])
@pytest.mark.slow
def test_a_block_of_commands_does_what_it_says(block: Block, cwd: Path) -> None:
    files = dict(FILE.findall((ROOT / block.page).read_text()))
    write_files(files, cwd)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands],
        cwd=cwd, env=os.environ | {"PATH": quick.path()}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == block.code, done.stdout + done.stderr
    if block.prints:
        printed = (line.strip() for line in rounded(done.stdout).splitlines())
        for line in map(str.strip, rounded(block.answer or "").splitlines()):
            assert line in printed, f"{line}\n is not in\n{done.stdout}"
    elif block.answer is not None:
        assert done.stderr == block.answer
        assert {path.name for path in cwd.iterdir()} - {"__pycache__"} == {Path(name).parts[0] for name in files}


def rounded(text: str) -> str:
    """Errors at the level of rounding, and the tensor that has the largest, depend on the processor."""
    text = re.sub(r"\b\d(?:\.\d+)?e-\d+\b", "E", text)
    return re.sub(r"\S+ of step \d+ fits", "T of step N fits", text)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.slow
def test_a_command_that_this_lane_does_not_run_is_a_whole_config(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    blocks = [*COMPOSED.findall(text), *CARD.findall(text)]
    if not blocks or page == "docs/from-elsewhere.md":  # transformers take seconds to import
        return
    write_files(dict(FILE.findall(text)), tmp_path)
    with importing_from(tmp_path):
        results = [(command, problem_of([*command, *OF_PAGE.get(page, ())])) for command in commands(blocks, tmp_path)]
    assert results
    assert [result for result in results if result[1] is not None] == []


def test_every_command_is_in_a_block_that_is_run_or_composed() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        shown = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        assert len(shown) == len(MENTION.findall(text)), f"{page}: a bash block has no marker above it"
        lines = [line for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        unmarked = [line for line in lines if COMMAND.match(line) and " [" not in line]  # usage: trainkit [VERB]
        assert unmarked == [], page


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "decisions").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_exit_codes_of_the_page_are_those_of_the_exceptions() -> None:
    from trainkit import errors

    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)}
    raised = {c.exit_code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TrainkitError)}
    assert codes == raised | {0}


def test_the_verbs_with_json_are_those_of_the_page() -> None:
    (names,) = re.findall(
        r"^((?:`\w+`(?:, | and ))+`\w+`) print one JSON", (ROOT / "docs/command-line.md").read_text(), re.MULTILINE
    )
    have = [verb for verb in VERBS if "json" in parser_of(verb)[1]]
    assert sorted(re.findall(r"`(\w+)`", names)) == sorted(have)
    assert len(have) * 2 > len(VERBS), "AGENTS.md says more than half"


@pytest.mark.slow
def test_the_table_of_features_is_what_the_strategies_refuse() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao, without which float8 is refused everywhere: pip install trainkit-torch[quantize]")
    script = runpy.run_path(str(ROOT / "scripts/features.py"))
    assert script["PAGE"].read_text() == script["page"](), "run python scripts/features.py --write"


PLACE = re.compile(r"\[`([\w.]+)`\]\(\.\./(trainkit/[\w/]+\.py)\)")


def test_each_line_about_a_run_and_its_step_names_a_function_that_is_there() -> None:
    links = PLACE.findall((ROOT / "docs/all-of-trainkit.md").read_text())
    assert len(links) > 50
    for name, path in links:
        body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            definitions = [node for node in body if getattr(node, "name", None) == part]
            assert definitions, f"{path} has no {name}"
            body = definitions[0].body if isinstance(definitions[0], ast.ClassDef) else []
