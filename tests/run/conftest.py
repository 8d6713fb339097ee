"""What the tests of processes share."""

from pathlib import Path

import pytest

from trainkit.run.folder.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder that does not exist yet."""
    return RunFolder(tmp_path / "run")
