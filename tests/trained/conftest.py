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

from trainkit.trained import checking, fresh_process


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run exports here."""

    def run(request: Mapping[str, Any], form: str, folder: Path) -> None:
        (folder / "request.json").write_text(json.dumps({**request, "threads": 1}))
        fresh_process.main(str(folder / "request.json"))

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(checking, "run_fresh", run)
