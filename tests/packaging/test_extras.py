"""What an extra installs is named by its own packages, in a checkout and in an installed wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from trainkit import extras


def test_the_command_names_the_packages_of_the_extra() -> None:
    assert extras.install_command("optuna", "optuna") == 'pip install "optuna>=4.4"'
    assert extras.install_command("spark", "pyspark").count('"') == 6
    assert extras.install_command("absent", "absent") == 'pip install "absent"'


def test_an_installed_package_reads_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_PROJECT", Path("absent"))
    lines = ["numpy", "pandas<3,>=2.2; extra == 'spark'", 'optuna>=4.4; extra == "optuna"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: lines)
    assert extras.packages_of("spark") == ("pandas<3,>=2.2",)
    assert extras.install_command("optuna", "optuna") == 'pip install "optuna>=4.4"'


def test_no_text_installs_a_project_of_another_name_from_the_index() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("recipes/*/README.md")]
    code = [*root.glob("trainkit/**/*.py"), *root.glob("hydra_plugins/**/*.py")]
    assert [path for path in (*pages, *code) if "trainkit[" in path.read_text(encoding="utf-8")] == []
