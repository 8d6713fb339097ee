"""A package outside of a project, or of another user, that its pyproject.toml makes trusted is caught here alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.verbs.support import project

FILES = {
    "pyproject.toml": '[tool.trainkit]\nconfig_dirs = ["conf"]\npackages = ["waves_of_mine"]\n',
    "conf/model/tiny.yaml": "_target_: waves_of_mine.Tiny\nwidth: 3\n",
    "src/waves_of_mine.py": "from torch import nn\n\nclass Tiny(nn.Linear):\n    def __init__(self, width: int = 2):\n"
    "        super().__init__(64, 10)\n    def forward(self, x):\n        return super().forward(x.flatten(1))\n",
    "below/notes": "",
}


@pytest.fixture
def home(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(text)
    monkeypatch.delitem(sys.modules, "waves_of_mine", raising=False)
    return cwd


def test_every_folder_of_a_project_has_its_choices_and_packages(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.environ.get("PYTHONPATH")
    monkeypatch.chdir(home / "below")
    assert main(["plan", "recipe=null", "model=tiny"]) == 0
    start = (
        f"project {home}/pyproject.toml: config folders ../conf; packages waves_of_mine (--no-project leaves it out)\n"
    )
    assert capsys.readouterr().err.startswith(start)
    assert (str(home / "src") in sys.path, os.environ.get("PYTHONPATH")) == (False, before)


def test_without_the_project_nothing_of_it_is_known(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del home
    assert main(["plan", "--no-project", "recipe=null", "model=tiny"]) == 2
    assert "project" not in capsys.readouterr().err


def test_all_problems_of_the_table_are_named_together(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "link").symlink_to("/usr/share")
    table = 'config_dir = 3\nconfig_dirs = ["conf", "gone"]\npackages = ["json", "torch", "link", "waves_of_mine"]\n'
    (home / "below/pyproject.toml").write_text("[tool.other]\n")
    (home / "pyproject.toml").write_text(f"[tool.trainkit]\n{table}")
    os.chdir(home / "below")
    assert main(["plan", "recipe=null", "model=tiny"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("5 problems in the config\n")
    for message in (
        "tool.trainkit.config_dir=3: no such key. Did you mean config_dirs?", f"=gone: there is no folder {home}/gone.",
        f"=json: there is no json in {home} or", "--allow-package torch.",
        f"=link: {home}/link is a link to /usr/share.",
    ):  # fmt: skip
        assert message in errors


def test_a_module_that_python_imports_from_elsewhere_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "json.py").write_text("")
    (home / "pyproject.toml").write_text('[tool.trainkit]\npackages = ["json"]\n')
    assert main(["plan", "recipe=digits"]) == 2
    assert "tool.trainkit.packages=json: Python imports json from " in capsys.readouterr().err


def test_what_belongs_to_another_user_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del home
    monkeypatch.setattr(project, "_is_mine", lambda path: path.suffix == ".toml")
    assert main(["plan", "recipe=null", "model=tiny"]) == 2
    monkeypatch.setattr(project, "_is_mine", lambda path: path.suffix != ".toml")
    assert main(["plan", "recipe=null", "model=tiny"]) == 2
    errors = capsys.readouterr().err
    assert "waves_of_mine.py belongs to another user. Only packages below" in errors
    assert "pyproject.toml: belongs to another user. To start without it: --no-project." in errors
