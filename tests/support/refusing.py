"""What a call or a command line refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli import main
from trainkit.errors import ConfigError

Refuse = Callable[..., list[str]]


def refused(call: Callable[..., object], *args: Any, **keys: Any) -> list[str]:
    """Return the problems of a call that must be refused, as the user reads them."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **keys)
    return [str(problem) for problem in caught.value.problems]


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
