"""What config tests share: a folder of a user's own YAMLs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def write_conf(tmp_path: Path) -> Write:
    """Write YAML files, `{"model/mine.yaml": text}`, and return their folder, as `--config-dir` takes it."""

    def write(files: Mapping[str, str]) -> Path:
        folder = tmp_path / "conf"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return write
