"""A finished run, trained once for the pages that read its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from tests.report.test_run_page import SHORT


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 24 steps on a device with a price; a test that changes a file takes a copy."""
    folder = tmp_path_factory.mktemp("pages") / "run"
    priced = ("hardware=laptop", "hardware.price_usd_h=3.6")
    trainkit.train([*SHORT, *priced, "optimizer.lr=0.02"], run_dir=folder)
    return folder
