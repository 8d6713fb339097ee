"""Hydra's internal modules may change in any release: one file imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trainkit

LIBRARY = Path(trainkit.__file__).parent


def imported_in(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "_internal" in text else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_one_file_imports_internal_modules_of_hydra() -> None:
    files = [*LIBRARY.rglob("*.py"), *LIBRARY.parent.joinpath("hydra_plugins").rglob("*.py")]
    found = [file for file in files if any(name.startswith("hydra._internal") for name in imported_in(file))]
    assert [file.relative_to(LIBRARY).as_posix() for file in found] == ["config/compose/hydra_adapter.py"]
