"""A page that shows an import which is not promised, or a promised name that is gone, is caught here alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import trainkit
from trainkit.names import NAMES

ROOT = Path(__file__).resolve().parents[2]
PROMISED = ("trainkit", "trainkit.testing", "trainkit.spark")
OF_AUTHORS = ("adding-a-strategy.md", "breaking-a-rule.md")
"""Pages for those who change trainkit."""


def test_every_promised_name_is_there_and_none_is_imported_before_it_is_used() -> None:
    for name in trainkit.__all__:
        assert getattr(trainkit, name) is not None
    assert dir(trainkit) == sorted([*trainkit.__all__, "testing"])
    code = "import sys, trainkit; sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_pages_and_the_template_import_promised_names_alone() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in OF_AUTHORS]
    for page in (ROOT / "README.md", *pages, *(ROOT / "template").rglob("*.py")):
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"^ *from (trainkit[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            assert module in PROMISED, f"{page.name}: {module}"
            for name in names.split(", ") if module == "trainkit" else ():
                assert name in (*trainkit.__all__, "testing", "spark"), f"{page.name}: {name}"
        for name in re.findall(r"`trainkit\.([A-Z]\w+)`", text):
            assert name in trainkit.__all__, f"{page.name}: trainkit.{name}"
        for name in re.findall(r"\btrainkit\.[a-z_]+\.[A-Z]\w+", text):
            assert name in NAMES, f"{page.name}: {name}"
