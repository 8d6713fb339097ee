"""A training that waits for a tracker that hangs, or that hides what it could not send, is caught here alone."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from pathlib import Path

import pytest

from tests.callbacks.run_double import row, run_double
from tests.tracking.folders import add_rows, run_folder
from trainkit.errors import ConfigError
from trainkit.tracking.state import read_state
from trainkit.tracking.wandb import Wandb

PACKAGE = "import time\n\ndef init(**_):\n    {body}\n\nSettings = dict\nRun = None\n"


def with_package(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package `wandb` whose `init` does this."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    (folder / "packages").mkdir()
    (folder / "packages" / "wandb.py").write_text(PACKAGE.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))


def test_an_absent_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r'logger.wandb: needs the package wandb. Install it: pip install "wandb>='):
        Wandb()


def test_a_tracker_that_hangs_gets_one_warning_and_a_limited_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_package(tmp_path, "time.sleep(600)", monkeypatch)
    run = run_double(run_folder(tmp_path / "run"))
    tracker = Wandb(warn_s=0.01, wait_s=0.5)
    with caplog.at_level(logging.WARNING):
        tracker.run_start(run)
        add_rows(run.folder, row(10))
        for _ in range(3):
            time.sleep(0.02)
            tracker.log(run, row(10))
        tracker.run_end(run, {})
    first, last = caplog.messages
    assert first.startswith("wandb cannot be reached (no answer for 0.01 s). The training continues")
    assert last.endswith(f"python -m trainkit.tracking {run.folder} sends the rest.")
    state = read_state(run.folder, "wandb")
    assert state is not None
    assert state.not_sent == "everything after step 0, the files and the end: no answer within 0.5 s"


def test_a_tracker_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_package(tmp_path, "raise ConnectionError('no route to the key-1234567')", monkeypatch)
    run, tracker = run_double(run_folder(tmp_path / "run")), Wandb(wait_s=60)
    tracker.run_start(run)
    tracker.run_end(run, {})
    assert "wandb did not receive everything: ConnectionError: no route" in caplog.text
