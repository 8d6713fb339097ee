"""A wheel without a YAML or a file of data, which works in a checkout alone, is caught here alone."""

import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT


@pytest.fixture
def run(installed: Path, cwd: Path, clean_environ: dict[str, str]) -> Callable[..., str]:
    """Runs the installed command in an empty folder; returns what it prints."""

    def run(*arguments: str) -> str:
        command = [str(installed / "trainkit"), *arguments]
        return subprocess.run(
            command, cwd=cwd, env=clean_environ, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    return run


def test_the_wheel_carries_what_runs_need_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [path.relative_to(ROOT) for kind in ("conf", "recipes") for path in (ROOT / kind).rglob("*.*")]
    assert not {f"trainkit/{path}" for path in shipped} - names
    assert [name for name in names if name.startswith("trainkit/docs/")] == ["trainkit/docs/errors.md"]
    assert {"trainkit/py.typed", "trainkit/data/digits.npz", "trainkit/data/digits.LICENSE"} <= names
    assert {f"trainkit/report/web/static/{name}" for name in ("uPlot.iife.min.js", "uPlot.LICENSE", "run.js")} <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"trainkit", "hydra_plugins", "trainkit_torch-0.1.0.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name == "hydra_plugins/__init__.py"]


def test_an_installed_wheel_trains_from_an_empty_folder(run: Callable[..., str], cwd: Path) -> None:
    run("steps=30", "hydra.run.dir=out")
    assert json.loads((cwd / "out" / "result.json").read_text())["steps"] == 30
    assert sorted(path.name for path in cwd.iterdir()) == ["out"]


def test_an_installed_wheel_contains_every_recipe_and_choice(run: Callable[..., str]) -> None:
    listed = run("ls")
    recipes = [path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()]
    choices = [path.stem for path in (ROOT / "conf").glob("*/*.yaml")]
    assert [name for name in [*recipes, *choices] if name not in listed] == []
    assert run("explain", "errors.model").startswith("Model\n\nCause: ")
