"""A checkout or an extra that installs another thing than it says is caught here alone."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from trainkit import extras


def test_the_packages_of_an_extra_are_named_in_a_checkout_and_in_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.install_command("optuna", "optuna") == 'pip install "optuna>=4.4"'
    assert extras.install_command("absent", "absent") == 'pip install "absent"'
    monkeypatch.setattr(extras, "_PROJECT", Path("absent"))
    lines = ["numpy", "pandas<3,>=2.2; extra == 'spark'", 'optuna>=4.4; extra == "optuna"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: lines)
    assert extras.packages_of("spark") == ("pandas<3,>=2.2",)
    assert extras.install_command("optuna", "optuna") == 'pip install "optuna>=4.4"'


def test_no_text_installs_a_project_of_another_name_from_the_index() -> None:
    patterns = ("README.md", "docs/*.md", "recipes/*/README.md", "trainkit/**/*.py", "hydra_plugins/**/*.py")
    files = (path for pattern in patterns for path in ROOT.glob(pattern))
    assert [path for path in files if "trainkit[" in path.read_text(encoding="utf-8")] == []


def test_a_checkout_works_without_being_installed(tmp_path: Path, cwd: Path, clean_environ: dict[str, str]) -> None:
    home = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run(
        [str(home / "bin" / "python"), "-m", "trainkit", "ls", "recipe"],
        cwd=cwd, env=clean_environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\ndigits " in done.stdout
