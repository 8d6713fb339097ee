"""What config tests share: a folder of a user's own YAMLs, and a run of the command line in an empty folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainkit.cli import main

Write = Callable[[Mapping[str, str]], Path]
Refuse = Callable[..., list[str]]


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


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a bad command line in an empty folder: the problems it prints; nothing may be left behind."""

    def run(*arguments: str) -> list[str]:
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert main(arguments) == 2
        assert list(folder.iterdir()) == []
        printed = capsys.readouterr()
        assert printed.out == ""
        head, *problems = printed.err.splitlines()
        assert head == f"{len(problems)} problem{'' if len(problems) == 1 else 's'} in the config"
        return [line.removeprefix("  ") for line in problems]

    return run
