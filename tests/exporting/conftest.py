"""The program that runs an export without trainkit, within this process: to start one for each comparison takes most of
the time. `test_checked_file.py` and one test of each format start it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainkit.exporting import checked_file, checking, fresh_process


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run exports here."""

    def run(form: str, request: Mapping[str, Any], folder: Path, place: Path) -> None:
        file = place / "request.json"
        file.write_text(json.dumps({"format": form, "folder": str(folder.absolute()), "threads": 1, **request}))
        fresh_process.main(str(file))

    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in (checked_file, checking):
        monkeypatch.setattr(module, "run_fresh", run)
